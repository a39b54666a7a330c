"""Pictures of the pages that ``--report`` writes, in both themes and at the width of a phone, by headless Chromium.

    python recipes/report_pictures.py PICTURES                  # of the model that ships: sweep, conversion, drift
    python recipes/report_pictures.py PICTURES --page DIR/report.html ...

Debian's ``chromium`` or ``chromium-headless-shell`` is enough. A line on stderr names every message of the console.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from kvfold.convert.cli import kvfold
from kvfold.convert.data import demo_folder

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
THEMES = {"dark": 0, "light": 1}  # Blink's preferredColorScheme
SIZES = {"desk": (1100, 470), "phone": (390, 400)}  # width, and height for each figure
HEAD, LINE = 100, {"desk": 34, "phone": 60}  # height of the title, and of a line or row above the figures
COLUMNS = {"desk": 2, "phone": 1}
TEXT = ("--samples", "4", "--seq-len", "64")  # what is drawn matters, not how good it is


def demo_reports(folder: Path) -> list[Path]:
    """The pages of a sweep, of a conversion by a budget, and of the drift of its result."""
    model, out = str(demo_folder()), str(folder / "out")
    commands = {
        "sweep": ["sweep", model, "--targets", "gqa:2 mqa mla:32+32", *TEXT, "--quiet"],
        "convert": ["convert", model, out, "--to", "mla", "--budget", "16", *TEXT, "--quiet"],
        "drift": ["drift", model, out, *TEXT],
    }
    for name, command in commands.items():
        kvfold.main([*command, "--report", str(folder / name)], standalone_mode=False)
    return [folder / name / "report.html" for name in commands]


def picture(browser: str, page: Path, picture_file: Path, theme: str, size: str) -> None:
    """One picture of the whole page, and its console on stderr."""
    text = page.read_text()
    width, each = SIZES[size]
    listed = size == "phone" and 'class="cards"' in text  # a phone shows every cell on a line of its own
    lines = len(re.findall("<p[ >]", text)) + (text.count("<td") // 2 if listed else text.count("<tr>"))
    height = HEAD + LINE[size] * lines + each * -(-text.count("<figure>") // COLUMNS[size])
    with tempfile.TemporaryDirectory(prefix="kvfold-browser-") as profile:
        done = subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={THEMES[theme]}",
                f"--window-size={width},{height}",
                f"--screenshot={picture_file}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    for line in done.stderr.splitlines():
        if "CONSOLE" in line:
            print(f"{page}: {line}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--page", type=Path, nargs="+", help="pages to draw; default: those of the model that ships")
    given = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"expected one of {', '.join(BROWSERS)}, found none: apt-get install chromium-headless-shell")
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvfold-reports-") as work:
        pages = given.page or demo_reports(Path(work))
        for page, theme, size in product(pages, THEMES, SIZES):
            file = (given.folder / f"{page.parent.name}-{theme}-{size}.png").resolve()
            picture(browser, page, file, theme, size)
            print(file)


if __name__ == "__main__":
    main()
