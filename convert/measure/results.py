"""Files of measured rows that several sittings fill."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def continue_rows(
    path: Path | None,
    header: Mapping[str, Any],
    rows: Callable[[list[Row]], Iterator[Row]],
    show: Callable[[Row], None],
) -> None:
    """Measure what the JSON file ``path`` lacks, and write the file after every row.

    ``rows(done)`` measures those that are not among the ``done``; ``show`` prints one. The file holds ``header`` and
    all ``rows``; without a ``path`` they are only printed.
    """
    done: list[Row] = []
    if path is not None and path.exists():
        done = json.loads(path.read_text())["rows"]
    for row in done:
        show(row)
    for row in rows(list(done)):
        show(row)
        done.append(row)
        if path is not None:
            path.write_text(json.dumps({**header, "rows": done}, indent=1) + "\n")
