"""The commands that measure, and ``--report``: a page that loads nothing, with a chart for
everything measured.
"""

import json
import math
import re
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvfold.convert import DriftRequest, console, drift_checkpoints, inspect_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.measure.figures import attention_rows_by_head, excess_by_cache

SVG = "{http://www.w3.org/2000/svg}"
TEXT = ["--samples", 2, "--seq-len", 16]
DRIFT = ["Drift by layer", "Attention rows by head", "Cache against context"]
CONVERSION = [
    "What the fit of the output projection gained",
    "Polishing",
    "Rotary slots by frequency",
]
CONVERSION += [f"Spectrum of {what}, and the cut" for what in ("rotary keys", "the latent")]


def run(*arguments):
    done = CliRunner().invoke(kvfold, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def swept(place, reader):
    """What a sweep said that decided, wrote the smallest target, and drew."""
    files = [
        "--json",
        place / "sweep.json",
        "--plot",
        place / "curve.svg",
        "--report",
        place / "sweep",
    ]
    targets = ["--targets", "mla:16+8", "mqa", "--within", 0.999, "--out", place / "mqa"]
    return run("sweep", reader, *targets, *TEXT, *files)


@pytest.fixture(scope="module")
def folder(place, reader, swept):
    """Pages of the sweep, of a conversion by a budget, and of the drift of its result."""
    budget = ["--to", "mla", "--budget", 6, "--polish", 2, "--quiet"]
    run("convert", reader, place / "out", *budget, *TEXT, "--report", place / "convert")
    run(
        "drift",
        reader,
        place / "out",
        *TEXT,
        "--report",
        place / "drift",
        "--json",
        place / "drift.json",
    )
    return place


def page(folder, name):
    text = (folder / name / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=", text)  # loads nothing
    assert all(
        "www.w3.org" in address for address in re.findall(r"https?://[^\"' ]+", text)
    )  # names of XML only
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def test_a_sweep_decides_and_writes(place, reader, swept):
    said = [
        line for line in swept.stderr.splitlines() if not line.startswith("[")
    ]  # "[0:50] reading .." if slow
    assert said[0] == f"reading {reader}"
    assert said[1].startswith("sweeping over 2 targets on 2 x 16 tokens")
    found = json.loads((place / "sweep.json").read_text())
    assert [target["target"] for target in found["targets"]] == ["mla:16+8", "mqa"]
    assert found["smallest"] == "mqa"
    mqa = found["targets"][1]
    assert mqa["saving"] == 0.75
    assert mqa["excess"]["margin"] > 0
    assert " ".join(mqa["command"].split()) in " ".join(swept.stdout.replace("\\\n", "").split())
    assert inspect_checkpoint(place / "mqa").attention == "MQA"
    drift = json.loads((place / "mqa" / "kvfold.json").read_text())["drift"]
    assert drift["kl"]["value"] == mqa["kl"]["value"]
    assert math.isclose(drift["excess"]["value"], mqa["excess"]["value"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("drift", DRIFT),
        ("convert", [*DRIFT, *CONVERSION, "Splits of 6 elements"]),
        ("sweep", ["Cache against loss", "Drift by layer", "Cache against context"]),
    ],
)
def test_every_chart_is_drawn_and_says_what_is_good(folder, name, titles):
    charts = list(page(folder, name).iter("figure"))
    assert [chart.find("h2").text for chart in charts] == titles
    for chart in charts:
        svg = chart.find(f"{SVG}svg")
        assert (
            len([mark for kind in ("path", "use", "image") for mark in svg.iter(f"{SVG}{kind}")])
            >= 2
        )
        assert "Good:" in "".join(chart.find("figcaption").itertext())
    assert len(list(page(folder, name).iter("tr"))) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"), [("drift", "drift"), ("convert", "convert"), ("sweep", "sweep")]
)
def test_a_page_has_one_headline_and_says_in_its_foot_how_it_was_made(folder, name, command):
    made = page(folder, name)
    (headline,) = ("".join(each.itertext()) for each in made.iter("h1"))
    judged = r"% less cache, (near the source|clearly worse than the source|needs training)$"
    assert re.search("within 99.9 % perplexity: MQA" if name == "sweep" else judged, headline)
    order = [
        each.tag for each in made.find("body") if each.tag in ("h1", "p", "div", "main", "footer")
    ]
    assert order[0] == "h1"
    assert order.index("p") < order.index("div") < order.index("main") < order.index("footer")
    if name != "sweep":
        lead = "".join(made.find("body").find("p").itertext())
        assert re.match(r"excess [+-][\d.]+ ± [\d.]+ nats, KL ", lead)
    foot = "".join(made.find("body").find("footer").itertext())
    assert "kvfold " in foot
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d, kvfold .*torch ", foot)


def test_a_plot_draws_the_same_chart_as_the_page(place, swept):
    plot = ElementTree.parse(place / "curve.svg")
    chart = next(page(place, "sweep").iter("figure")).find(f"{SVG}svg")
    drawn = [len(list(each.iter(f"{SVG}path"))) for each in (plot, chart)]
    assert drawn[0] >= drawn[1] > 10
    assert all(word in (place / "curve.svg").read_text() for word in ("MLA 16+8", "MQA"))


def test_targets_of_one_size_stand_beside_each_other_and_a_line_joins_the_best():
    sizes = {
        "104+88": (192, 0.11),
        "128+64": (192, 0.12),
        "152+40": (192, 0.31),
        "64+32": (96, 0.8),
    }
    rows = [
        Mock(
            kind=kind,
            cache_elements=elements,
            excess=excess,
            **{"measured.excess_margin": 0.1, "request.to": "mla"},
        )
        for kind, (elements, excess) in sizes.items()
    ]
    (axes,) = excess_by_cache(Mock(rows=rows, **{"source.cache_elements": 384}), 0.01).figure.axes
    bars = [bar.lines[0].get_xydata()[0] for bar in axes.containers]
    assert [value for _, value in bars] == [excess for _, excess in sizes.values()]
    assert len({x for x, _ in bars}) == 4
    assert any(
        line.get_ydata().tolist() == [0.11, 0.8]
        for line in axes.lines
        if len(line.get_ydata()) == 2
    )
    assert [text.get_text().split("\n") for text in axes.texts] == [
        ["152+40", "128+64", "104+88"],
        ["64+32"],
    ]


def test_the_numbers_of_a_drift_name_their_inputs_and_fill_the_map_of_heads(folder, reader):
    drift = json.loads((folder / "drift.json").read_text())
    expected = [[head["row_kl"]["value"] for head in layer["heads"]] for layer in drift["layers"]]
    report = drift_checkpoints(
        DriftRequest(reader, folder / "out", samples=2, seq_len=16, quiet=True)
    )
    (image,) = attention_rows_by_head(report).figure.axes[0].images
    assert image.get_array().tolist() == expected
    assert (image.norm.vmin, image.norm.vmax) == (1e-4, 1.0)
    assert [len(drift[name]["sha256"]) for name in ("source", "converted", "text")] == [64] * 3
    assert drift["text"]["seed"] == 0
    line = ["drift", reader, folder / "out", *TEXT, "--json", "-", "--seed"]
    again, other = (json.loads(run(*line, seed).stdout) for seed in (0, 1))
    assert again["perplexity"] == drift["perplexity"] != other["perplexity"]
    assert other["text"]["seed"] == 1


@pytest.mark.parametrize("name", ["FOLDER", "FILE"])
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(tmp_path, monkeypatch, name, told):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    if name == "FOLDER":  # without matplotlib
        monkeypatch.setattr(console, "find_spec", lambda name: None)
    told(CliRunner().invoke(kvfold, ["drift", "nothing", "nothing", "--report", name]).exception)
