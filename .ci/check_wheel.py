"""Assert that a wheel holds the files that a mapped package drops without ``package-data``."""

import sys
import zipfile
from pathlib import Path


def expected(root: Path) -> set[str]:
    """Names in the wheel of every data file of the packages."""
    data = [root / "convert/py.typed", root / "attention/py.typed", root / "attention/README.md"]
    data += (root / "convert/families").glob("*.json")
    data += (root / "convert/data/demo").glob("*")
    data += (root / "convert/data").glob("*.xz")
    data += [root / "convert/data/NOTICE"]
    data += (root / "recipes").glob("*.toml")
    data += (root / "recipes").glob("*.yaml")
    return {f"kvfold/{path.relative_to(root).as_posix()}" for path in data}


def main() -> None:
    wheel = sys.argv[1]
    wanted = expected(Path(__file__).resolve().parent.parent)
    found = set(zipfile.ZipFile(wheel).namelist())
    missing = sorted(wanted - found)
    must = ("convert/data/demo/model.safetensors", "recipes/llama-2-7b-gqa-8.toml")
    few = [name for name in must if f"kvfold/{name}" not in wanted]
    if missing or few or len(wanted) < 20:
        raise SystemExit(f"{wheel}: expected {len(wanted)} data files, missing: {', '.join(missing + few)}")
    if scripts := sorted(name for name in found if name.startswith("kvfold/recipes/") and name.endswith(".py")):
        raise SystemExit(f"{wheel}: expected recipes without the repository's scripts, found {', '.join(scripts)}")
    print(f"{wheel}: {len(found)} files, all {len(wanted)} data files among them")


if __name__ == "__main__":
    main()
