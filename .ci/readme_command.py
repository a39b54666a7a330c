"""Print the command that the README gives under ``<!-- command: NAME -->``, so that what is tested
is what is told.
"""

import re
import sys
from pathlib import Path


def main() -> None:
    readme, name = sys.argv[1:]
    found = re.search(
        rf"<!-- command: {name} -->\s*```(?:sh|bash)\n(.*?)```", Path(readme).read_text(), re.DOTALL
    )
    if found is None:
        raise SystemExit(f"{readme}: no command block named {name}")
    print(found[1].strip())


if __name__ == "__main__":
    main()
