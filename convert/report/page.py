"""The page around the figures: one file of HTML without a script, a font or a request, in a light and a dark theme."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kvfold.convert.errors import InputError
from kvfold.convert.report.svg import SERIES

FILE = "report.html"
_INDENTED = ' class="indented"'
_NARROW = 4  # columns that a phone shows side by side
_WHOLE = re.compile(r"(?<![\w-])--[a-z][a-z-]*|\b[\d.]+e-\d+")  # options and small numbers
_THEMES = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #2e3440; --dim: #6b7280; --rule: #e5e7eb;
  --c0: #2f6db5; --c1: #c2571a; --c2: #3f8f4f; --c3: #8a5aa8; --c4: #b03a5b; --c5: #8a6d1a; }
@media (prefers-color-scheme: dark) { :root { --back: #15181d; --ink: #e5e9f0; --dim: #9aa3b2; --rule: #333a45;
  --c0: #74aef0; --c1: #f0935a; --c2: #82cf8e; --c3: #c99be6; --c4: #f08aa8; --c5: #d8bd62; } }
"""
_PAGE = """
body { background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem;
  max-width: 64rem; }
h1 { font-size: 1.4rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; } code { font-size: .85rem; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem; }
.indented { padding-left: 1.2rem; } .whole { white-space: nowrap; }
figure { margin: 0; } figcaption, .dim { color: var(--dim); font-size: .9rem; }
.wide { overflow-x: auto; margin: .8rem 0 1.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
svg { width: 100%; height: auto; display: block; }
@media (max-width: 30rem) { table { font-size: .75rem; } th, td { padding-right: .3rem; }
  .cards, .cards tbody, .cards tr, .cards td { display: block; } .cards thead { display: none; }
  .cards { font-size: .9rem; } .cards tr { padding: .5rem 0; border-bottom: 1px solid var(--rule); }
  .cards td { display: flex; justify-content: space-between; border: 0; padding: .1rem 0; }
  .cards td:first-child { font-weight: 600; } .cards td + td::before { content: attr(data-name); color: var(--dim); } }
"""
_DRAWING = """
svg text { font: 9.5px system-ui, sans-serif; fill: var(--dim); }
svg .label { fill: var(--ink); } svg .name { paint-order: stroke; stroke: var(--back); stroke-width: 3; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
""" + "".join(
    f"svg .l{kind} {{ stroke: var(--c{kind}); stroke-width: 1.6; fill: none; }}\n"
    f"svg .f{kind} {{ fill: var(--c{kind}); }} svg .t{kind} {{ fill: var(--c{kind}); }}\n"
    for kind in range(SERIES)
)


@dataclass(frozen=True)
class Figure:
    """A drawing, and a sentence on what it shows and what is good."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Page:
    """Lines of text, a table (its first row is the head), figures."""

    title: str
    lines: Sequence[str]
    table: Sequence[Sequence[str]]
    figures: Sequence[Figure]

    def html(self) -> str:
        """The page: well-formed XML behind its first line."""
        lines = "".join(
            f"<p{_INDENTED if line.startswith(' ') else ''}>{_text(line.strip())}</p>" for line in self.lines
        )
        figures = "".join(
            f"<figure><h2>{escape(each.title)}</h2>{each.svg}<figcaption>{_text(each.caption)}</figcaption></figure>"
            for each in self.figures
        )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
            f"<title>{escape(self.title)}</title><style>{_THEMES}{_PAGE}{_DRAWING}</style></head><body>"
            f"<h1>{escape(self.title)}</h1>{lines}{_table(self.table)}<main>{figures}</main></body></html>\n"
        )


def _text(line: str) -> str:
    """A line as HTML, in which no option and no number breaks at its hyphens."""
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(line))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first of the rows is the head; of a wide table a phone shows every row as a list."""
    if not rows:
        return ""

    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, rows[0], cells))}</tr>" for cells in rows[1:])
    kind = ' class="cards"' if len(rows[0]) > _NARROW else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(name: str, cell: str) -> str:
    """A cell that carries its column's ``name``, which a phone shows beside it."""
    return f'<td data-name="{escape(name)}">{escape(cell)}</td>'


def drawing(svg: str) -> str:
    """A figure's ``svg`` as a file of its own, in both themes."""
    start, rest = svg.split(">", 1)
    return f"{start}><style>{_THEMES}svg {{ background: var(--back); }}{_DRAWING}</style>{rest}\n"


def check_report(folder: str) -> None:
    """Raise InputError when ``--report folder`` cannot be written."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InputError(f"--report {folder}: expected a folder, found a file; name another")


def write_report(page: Page, folder: str, quiet: bool = False) -> Path:
    """Write the page to ``report.html`` in ``folder``, which is made. Raises InputError when that fails.

    A line on stderr says where it is, unless ``quiet``.
    """
    file = Path(folder) / FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page.html(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--report {folder}: cannot be written ({error.strerror}): name another folder") from error
    if not quiet:
        print(f"wrote {file}: open it in a browser", file=sys.stderr)
    return file
