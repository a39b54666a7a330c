"""Reports: one page that loads nothing, with every figure of its data drawn and explained."""

import json
import re
import shutil
import subprocess
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from helpers.checkpoints import add_demo_tokenizer
from matplotlib import image

from kvfold.convert.cli import kvfold
from kvfold.convert.report.figures import curve_figure
from kvfold.convert.report.svg import Line, counted_axis, line_chart, linear_axis, log_axis

SVG = "{http://www.w3.org/2000/svg}"
DRIFT = ["Drift by layer", "Attention rows by head", "Cache against context"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)


def run(*arguments):
    done = CliRunner().invoke(kvfold, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_family):
    """Reports of a sweep, of a conversion by a budget, and of the drift of its result."""
    place = tmp_path_factory.mktemp("report")
    shutil.copytree(tiny_family("llama", vocab_size=2048, mlp_bias=False), place / "model")
    add_demo_tokenizer(place / "model")
    text = ["--samples", 4, "--seq-len", 24]
    run("sweep", place / "model", "--targets", "mqa", "mla:32", *text, "--quiet", "--report", place / "sweep")
    convert = ["convert", place / "model", place / "out", "--to", "mla", "--budget", 32, *text, "--quiet"]
    run(*convert, "--report", place / "convert")
    run("drift", place / "model", place / "out", *text, "--report", place / "drift", "--json", place / "drift.json")
    return place


def page(folder, name):
    text = (folder / name / "report.html").read_text()
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("drift", DRIFT),
        (
            "convert",
            [
                *DRIFT,
                "What the fit of the output projection gained",
                "Rotary slots by frequency",
                "Spectrum of rotary keys, and the cut",
                "Spectrum of the latent, and the cut",
                "Splits of 32 elements",
            ],
        ),
        ("sweep", ["Cache against loss", "Drift by layer", "Cache against context", "Splits of 32 elements"]),
    ],
)
def test_every_figure_is_drawn_and_says_what_is_good(folder, name, titles):
    figures = list(page(folder, name).iter("figure"))
    assert [figure.find("h2").text for figure in figures] == titles
    for figure in figures:
        svg = figure.find(f"{SVG}svg")
        marks = [mark for kind in ("polyline", "rect", "circle") for mark in svg.iter(f"{SVG}{kind}")]
        assert len(marks) >= 2
        numbers = [float(value) for mark in marks for key, value in mark.items() if key in ("x", "y", "cx", "cy")]
        assert all(0 <= value <= 400 for value in numbers)
        assert "Good:" in figure.find("figcaption").text


@pytest.mark.parametrize("name", ["drift", "convert", "sweep"])
def test_a_page_is_one_file_with_two_themes(folder, name):
    text = (folder / name / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert '<meta name="viewport" content="width=device-width' in text
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    defined, used = set(re.findall(r"(--[a-z0-9]+):", text)), set(re.findall(r"var\((--[a-z0-9]+)\)", text))
    assert used <= defined


@pytest.mark.parametrize(("name", "listed"), [("sweep", True), ("drift", False)])
def test_a_phone_lists_the_rows_of_a_wide_table(folder, name, listed):
    table = next(page(folder, name).iter("table"))
    head = [cell.text for cell in table.iter("th")]
    assert (table.get("class") == "cards") == listed == (len(head) > 4)
    for row in table.find("tbody"):
        assert [cell.get("data-name") or None for cell in row] == head


def test_a_legend_that_is_too_long_has_further_rows_above():
    names = [f"MLA {rank}+64" for rank in (64, 128, 192, 256, 320, 512)]
    lines = [Line(name, [(0, 1.0), (1, 2.0)], kind) for kind, name in enumerate(names)]
    drawn = ElementTree.fromstring(line_chart("title", counted_axis("x", 2), linear_axis("y", [2.0]), lines))
    left, top, width, height = map(float, drawn.get("viewBox").split())
    keys = {text.text: text for text in drawn.iter(f"{SVG}text") if text.text in names}
    assert list(keys) == [*names[4:], *names[:4]]
    assert all(top <= float(key.get("y")) <= top + height for key in keys.values())
    assert all(float(key.get("x")) + 5.4 * len(name) <= left + width for name, key in keys.items())
    assert len({key.get("y") for key in keys.values()}) == 2


def test_targets_of_one_size_stand_beside_each_other_and_no_name_on_another():
    sizes = {"104+88": (192, 0.11), "128+64": (192, 0.12), "152+40": (192, 0.31), "64+32": (96, 0.8)}
    targets = [
        {
            "kind": kind,
            "options": {"to": "mla"},
            "cache_elements_per_token_per_layer": elements,
            "excess": {"value": excess, "low": excess - 0.1, "high": excess + 0.1},
        }
        for kind, (elements, excess) in sizes.items()
    ]
    figure = curve_figure({"source": {"elements": 384}, "targets": targets, "within": 0.01})
    drawn = ElementTree.fromstring(figure.svg)
    assert len({point.get("cx") for point in drawn.iter(f"{SVG}circle")}) == 4
    best = next(line for line in drawn.iter(f"{SVG}polyline") if line.get("stroke-dasharray") is None)
    assert len(best.get("points").split()) == 2  # of each size the best one
    names = [text for text in drawn.iter(f"{SVG}text") if text.text in sizes]
    heights = sorted(float(text.get("y")) for text in names)
    assert len(names) == 4
    assert all(below - above >= 10 for above, below in pairwise(heights))


def test_a_heat_map_has_a_cell_per_head_strongest_where_the_kl_is_largest(folder):
    drift = json.loads((folder / "drift.json").read_text())
    expected = [head["row_kl"]["value"] for layer in drift["layers"] for head in layer["heads"]]
    figure = next(each for each in page(folder, "drift").iter("figure") if each.find("h2").text == DRIFT[1])
    found = [float(cell.get("fill-opacity")) for cell in figure.iter(f"{SVG}rect")]
    assert found == pytest.approx([value / max(expected) for value in expected], abs=1e-3)


def test_drift_names_models_and_text_with_hashes_and_the_seed_draws_the_text(folder):
    drift = json.loads((folder / "drift.json").read_text())
    assert [len(drift[name]["sha256"]) for name in ("source", "converted", "text")] == [64] * 3
    assert drift["text"]["seed"] == 0
    line = ["drift", folder / "model", folder / "model", "--samples", 1, "--seq-len", 16, "--json", "-", "--seed"]
    seeds = [json.loads(run(*line, seed).stdout) for seed in (0, 1, 1)]
    losses = [each["perplexity"]["source"] for each in seeds]
    assert losses[0] != losses[1] == losses[2]
    assert seeds[1]["text"]["seed"] == 1


def test_a_folder_that_is_a_file_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    done = CliRunner().invoke(kvfold, ["drift", "nothing", "nothing", "--report", str(tmp_path / "file")])
    assert "--report" in str(done.exception)
    assert "expected a folder, found a file" in str(done.exception)


@pytest.mark.parametrize("values", [[0.0], [0.011, 0.4], [-0.02, 1e-4], [3.0, 3.0]])
def test_axes_hold_their_values_between_round_ticks(values):
    axis = linear_axis("x", values)
    assert axis.low <= min(0, *values) <= max(0, *values) <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    log = log_axis("x", [abs(value) for value in values])
    assert log.low < log.high
    assert all(log.low <= abs(value) <= log.high for value in values if value)


# One figure under another, each in a band of its own, and nothing of the page but the drawings.
BAND = 300  # pixels
BANDS = f"""<style>html, body, main {{ margin: 0; padding: 0; display: block; max-width: none; }}
body > *:not(main), h2, figcaption {{ display: none; }} figure, svg {{ height: {BAND}px; }}</style></head>"""
UNMARKED = "<style>svg polyline, svg rect, svg circle { display: none; }</style></head>"


def screenshot(html, folder, theme):
    """The pixels of a page [height, width, 3] as headless Chromium draws it in a theme: 0 is dark, 1 is light."""
    (folder / "page.html").write_text(html)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    size = f"--window-size=600,{BAND * html.count('<figure>')}"
    theme = f"--blink-settings=preferredColorScheme={theme}"
    files = [f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'page.png'}"]
    command = [CHROMIUM, *options, size, theme, *files, (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    return image.imread(folder / "page.png")[..., :3]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_chromium_paints_every_figure_in_both_themes(folder, tmp_path):
    html = (folder / "convert" / "report.html").read_text().replace("</head>", BANDS)
    dark, light = (screenshot(html, tmp_path, theme) for theme in (0, 1))
    assert dark[0, 0].max() < 0.2 < 0.8 < light[0, 0].min()
    unmarked = screenshot(html.replace("</head>", UNMARKED), tmp_path, 1)
    for top in range(0, len(light), BAND):
        drawn, dim, empty = (page[top : top + BAND] for page in (light, dark, unmarked))
        assert all(page.std(axis=(0, 1)).max() > 0.01 for page in (drawn, dim))
        assert (abs(drawn - empty).max(axis=2) > 0.1).sum() > 50  # the marks are painted, not the axes alone
