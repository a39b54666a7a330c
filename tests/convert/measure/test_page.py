"""``--report`` and ``--plot``: one page that loads nothing, with a chart for everything that was measured."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from helpers.checkpoints import add_demo_tokenizer

from kvfold.convert import console
from kvfold.convert.cli import kvfold
from kvfold.convert.measure.figures import attention_rows_by_head, excess_by_cache

SVG = "{http://www.w3.org/2000/svg}"
DRIFT = ["Drift by layer", "Attention rows by head", "Cache against context"]


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
    text = ["--samples", 2, "--seq-len", 16]
    plot = ["--plot", place / "curve.svg"]
    run("sweep", place / "model", "--targets", "mqa", "mla:16+8", *text, "--quiet", "--report", place / "sweep", *plot)
    convert = ["convert", place / "model", place / "out", "--to", "mla", "--budget", 12, *text, "--quiet"]
    run(*convert, "--report", place / "convert")
    run("drift", place / "model", place / "out", *text, "--report", place / "drift", "--json", place / "drift.json")
    return place


def page(folder, name):
    text = (folder / name / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=", text)  # loads nothing
    assert all("www.w3.org" in address for address in re.findall(r"https?://[^\"' ]+", text))  # names of XML only
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


CONVERSION = ["What the fit of the output projection gained", "Rotary slots by frequency"]
CONVERSION += [f"Spectrum of {what}, and the cut" for what in ("rotary keys", "the latent")]


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("drift", DRIFT),
        ("convert", [*DRIFT, *CONVERSION, "Splits of 12 elements"]),
        ("sweep", ["Cache against loss", "Drift by layer", "Cache against context"]),
    ],
)
def test_every_chart_is_drawn_and_says_what_is_good(folder, name, titles):
    charts = list(page(folder, name).iter("figure"))
    assert [chart.find("h2").text for chart in charts] == titles
    for chart in charts:
        svg = chart.find(f"{SVG}svg")
        assert len([mark for kind in ("path", "use", "image") for mark in svg.iter(f"{SVG}{kind}")]) >= 2
        assert "Good:" in "".join(chart.find("figcaption").itertext())
    assert len(list(page(folder, name).iter("tr"))) > 2


def test_a_plot_draws_the_same_chart_as_the_page(folder):
    def paths(element):
        return [path.get("d") for path in element.iter(f"{SVG}path")]

    plot = paths(ElementTree.parse(folder / "curve.svg"))
    assert len(plot) >= len(paths(next(page(folder, "sweep").iter("figure")).find(f"{SVG}svg"))) > 10


def test_targets_of_one_size_stand_beside_each_other_and_a_line_joins_the_best():
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
    (axes,) = excess_by_cache({"source": {"elements": 384}, "targets": targets, "within": 0.01}).figure.axes
    bars = [bar.lines[0].get_xydata()[0] for bar in axes.containers]
    assert [value for _, value in bars] == [excess for _, excess in sizes.values()]
    assert len({place for place, _ in bars}) == 4
    assert any(line.get_ydata().tolist() == [0.11, 0.8] for line in axes.lines if len(line.get_ydata()) == 2)
    assert [text.get_text().split("\n") for text in axes.texts] == [["152+40", "128+64", "104+88"], ["64+32"]]


def test_a_heat_map_has_a_cell_per_head(folder):
    drift = json.loads((folder / "drift.json").read_text())
    expected = [[head["row_kl"]["value"] for head in layer["heads"]] for layer in drift["layers"]]
    assert attention_rows_by_head(drift).figure.axes[0].images[0].get_array().tolist() == expected


def test_drift_names_models_and_text_with_hashes_and_the_seed_draws_the_text(folder):
    drift = json.loads((folder / "drift.json").read_text())
    assert [len(drift[name]["sha256"]) for name in ("source", "converted", "text")] == [64] * 3
    assert drift["text"]["seed"] == 0
    line = ["drift", folder / "model", folder / "model", "--samples", 1, "--seq-len", 16, "--json", "-", "--seed"]
    seeds = [json.loads(run(*line, seed).stdout) for seed in (0, 1, 1)]
    losses = [each["perplexity"]["source"] for each in seeds]
    assert losses[0] != losses[1] == losses[2]
    assert seeds[1]["text"]["seed"] == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FOLDER", "--report FOLDER draws with matplotlib; install it: pip install 'kvfold[report]'"),
        ("FILE", "--report FILE is a file; name a folder"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(tmp_path, monkeypatch, name, problem):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    if name == "FOLDER":
        monkeypatch.setattr(console, "find_spec", lambda name: None)
    done = CliRunner().invoke(kvfold, ["drift", "nothing", "nothing", "--report", name])
    assert done.exception.message == problem
