"""``--report``: a page that loads nothing, with plots of what was measured."""

import re
import sys
from xml.etree import ElementTree

import pytest
from helpers.checkpoints import read_json
from helpers.processes import run_kvfold

from kvfold.convert import console, inspect_checkpoint
from kvfold.convert.measure.report import write_report

SVG = "{http://www.w3.org/2000/svg}"
TEXT = ["--samples", 2, "--seq-len", 16]


def read_page(folder):
    """The page as XML. It must load nothing: addresses are names of XML only."""
    text = (folder / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=", text)
    assert all("www.w3.org" in address for address in re.findall(r"https?://[^\"' ]+", text))
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, reader):
    """Pages of a sweep, of a conversion, and of the drift of its result."""
    folder = tmp_path_factory.mktemp("report")
    targets = ["--targets", "mla:16+8", "mqa", "--within", 0.999, "--out", folder / "mqa"]
    files = ["--json", folder / "sweep.json", "--report", folder / "sweep"]
    run_kvfold("sweep", reader, *targets, *TEXT, *files)
    options = ["--to", "mqa", "--quiet", "--report", folder / "convert"]
    run_kvfold("convert", reader, folder / "out", *options, *TEXT)
    text = ["--samples", 2, "--seq-len", 128]
    run_kvfold("drift", reader, folder / "out", *text, "--report", folder / "drift")
    return folder


def test_a_sweep_decides_and_writes(folder):
    found = read_json(folder / "sweep.json")
    assert [row["target"] for row in found["rows"]] == ["mla:16+8", "mqa"]
    assert found["smallest"] == "mqa"
    assert inspect_checkpoint(folder / "mqa").attention == "MQA"
    drift = read_json(folder / "mqa" / "kvfold.json")["drift"]
    assert drift["kl"]["value"] == found["rows"][1]["kl"]["value"]
    assert drift["excess"]["value"] == pytest.approx(found["rows"][1]["excess"]["value"])


def test_a_sweep_without_a_target_within_the_limit_writes_nothing(tmp_path, reader, refused):
    options = ["--targets", "mla:2+2", "--within", 1e-9, "--out", tmp_path / "out", *TEXT]
    with refused(field="within"):
        run_kvfold("sweep", reader, *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "headline", "titles"),
    [
        ("sweep", "within 99.9 % perplexity: MQA", ["Cache against loss"]),
        ("convert", "as MQA: 75.0 % less cache, ", ["Drift by layer"]),
        ("drift", "out: 75.0 % less cache, ", ["Drift by layer", "Loss by position"]),
    ],
)
def test_a_page_has_a_headline_tables_plots_and_says_how_it_was_made(
    folder, name, headline, titles
):
    page = read_page(folder / name)
    assert headline in page.find("body/h1").text
    assert len(list(page.iter("tr"))) > 2
    figures = list(page.iter("figure"))
    assert [figure.find("h2").text for figure in figures][: len(titles)] == titles
    for figure in figures:
        assert len(list(figure.iter(f"{SVG}path"))) > 2
        assert "Good:" in figure.find("figcaption").text
    foot = "".join(page.find("body/footer").itertext())
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d, kvfold .*torch ", foot)


def test_a_hostile_name_stays_text(tmp_path, monkeypatch):
    name = "<script>alert(1)</script>&\x1b[31m"
    monkeypatch.setattr(sys, "argv", ["kvfold", name])
    write_report(str(tmp_path), name, name, [[[name], [name]]], [], name, True)
    page = read_page(tmp_path)
    assert page.find("body/h1").text == "<script>alert(1)</script>&\N{REPLACEMENT CHARACTER}[31m"


@pytest.mark.parametrize("name", ["FOLDER", "FILE"])
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, name, refused
):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    if name == "FOLDER":  # without matplotlib
        monkeypatch.setattr(console, "find_spec", lambda name: None)
    with refused(field="report"):
        run_kvfold("drift", "nothing", "nothing", "--report", name)
