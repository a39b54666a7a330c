"""The finished rows of a sweep, kept in the user's cache folder until it ends, so that the same
command continues.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.files import replacing, write_file
from kvfold.convert.conversion.journal import run_settings
from kvfold.convert.conversion.plan import Plan


class KeptRows:
    """The rows of an unfinished sweep, JSON objects by target; ``options`` are those of the sweep,
    ``plan`` a target's.

    A sweep of other options has another file. Rows are discarded, with a line on stderr, if files
    of the model or text have changed since. Without a writable cache folder nothing is kept.
    """

    def __init__(self, plan: Plan, options: Mapping[str, Any], fresh: bool) -> None:
        settings = run_settings(plan)
        device, _, threads, processes = settings["device"]
        about = [options, device, threads, processes, settings["versions"]]
        digest = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = cache / "kvfold" / f"sweep-{digest[:16]}.json"
        self._files = settings["files"]
        self.rows: dict[str, Any] = {}
        try:
            kept = json.loads(self.path.read_bytes())
            rows = dict(kept["rows"])
            files = list(kept["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if fresh:
            return
        if changed := [Path(file[0]).name for file in self._files if file not in files]:
            why = f"{', '.join(changed)} changed since then"
            print(
                f"discarding the rows ({len(rows)}) of an interrupted sweep: {why}", file=sys.stderr
            )
            return
        self.rows = rows

    def add(self, target: str, row: dict[str, Any]) -> None:
        """Keep the row of a finished target."""
        self.rows[target] = row
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.path) as new:
                write_file(new, json.dumps({"files": self._files, "rows": self.rows}))
        except OSError as error:
            print(
                f"warning: {self.path}: finished rows are not kept ({error.strerror})",
                file=sys.stderr,
            )

    def forget(self) -> None:
        """Remove the file, after the sweep's end."""
        with suppress(OSError):  # without a usable cache folder there is none
            self.path.unlink()
