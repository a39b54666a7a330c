"""``--report`` and ``--plot``: a page that loads nothing, and plots of what was measured."""

import json
import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from kvfold.convert import console, inspect_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.measure.plots import plot_loss_by_cache
from kvfold.convert.measure.report import write_report

SVG = "{http://www.w3.org/2000/svg}"
TEXT = ["--samples", 2, "--seq-len", 16]


def run(*arguments):
    done = CliRunner().invoke(kvfold, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def read_page(folder):
    """The page as XML. It must load nothing: addresses are names of XML only."""
    text = (folder / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)|src=", text)
    assert all("www.w3.org" in address for address in re.findall(r"https?://[^\"' ]+", text))
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def make_sweep(sizes):
    """A sweep of targets by kind: cache elements and excess loss."""
    rows = [
        SimpleNamespace(
            kind=kind,
            cache_elements=elements,
            excess=excess,
            measured=SimpleNamespace(excess_margin=0.1),
            request=SimpleNamespace(to="mla"),
        )
        for kind, (elements, excess) in sizes.items()
    ]
    return SimpleNamespace(rows=rows, source=SimpleNamespace(cache_elements=384))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, reader):
    """Pages of a sweep, of a conversion, and of the drift of its result."""
    folder = tmp_path_factory.mktemp("report")
    targets = ["--targets", "mla:16+8", "mqa", "--within", 0.999, "--out", folder / "mqa"]
    files = ["--json", folder / "sweep.json", "--plot", folder / "plot.svg"]
    run("sweep", reader, *targets, *TEXT, *files, "--report", folder / "sweep")
    options = ["--to", "mqa", "--quiet", "--report", folder / "convert"]
    run("convert", reader, folder / "out", *options, *TEXT)
    text = ["--samples", 2, "--seq-len", 128]
    run("drift", reader, folder / "out", *text, "--report", folder / "drift")
    return folder


def test_a_sweep_decides_and_writes(folder):
    found = json.loads((folder / "sweep.json").read_text())
    assert [target["target"] for target in found["targets"]] == ["mla:16+8", "mqa"]
    assert found["smallest"] == "mqa"
    assert inspect_checkpoint(folder / "mqa").attention == "MQA"
    drift = json.loads((folder / "mqa" / "kvfold.json").read_text())["drift"]
    assert drift["kl"]["value"] == found["targets"][1]["kl"]["value"]
    assert drift["excess"]["value"] == pytest.approx(found["targets"][1]["excess"]["value"])


@pytest.mark.slow
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
    write_report(str(tmp_path), name, name, [name], [[[name], [name]]], [], [name], True)
    page = read_page(tmp_path)
    assert page.find("body/h1").text == "<script>alert(1)</script>&\N{REPLACEMENT CHARACTER}[31m"


@pytest.mark.parametrize(("file", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_equal_values_give_equal_files_whatever_the_model_is_called(tmp_path, file, start):
    title = "a $model$ of \\frac $x_{$"
    contents = []
    for excess in (0.1, 0.1, 0.2):
        sweep = make_sweep({"128+64": (192, excess)})
        plot_loss_by_cache(sweep, 0.01).save(str(tmp_path / file), title)
        contents.append((tmp_path / file).read_bytes())
    assert contents[0].startswith(start)
    assert contents[0] == contents[1] != contents[2]
    assert file == "a.png" or title in contents[0].decode()


def test_targets_of_one_size_stand_beside_each_other_and_a_line_joins_the_best():
    sizes = {"a": (192, 0.11), "b": (192, 0.12), "c": (192, 0.31), "d": (96, 0.8)}
    (axes,) = plot_loss_by_cache(make_sweep(sizes), 0.01).figure.axes
    points = [bar.lines[0].get_xydata()[0].tolist() for bar in axes.containers]
    assert {excess for _, excess in points} == {0.11, 0.12, 0.31, 0.8}
    assert len({x for x, _ in points}) == 4
    assert any(set(line.get_ydata()) == {0.11, 0.8} for line in axes.lines)
    assert {text.get_text() for text in axes.texts} == {"c\nb\na", "d"}


@pytest.mark.parametrize("name", ["FOLDER", "FILE"])
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, name, refused
):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    if name == "FOLDER":  # without matplotlib
        monkeypatch.setattr(console, "find_spec", lambda name: None)
    line = ["drift", "nothing", "nothing", "--report", name]
    with refused() as error:
        CliRunner().invoke(kvfold, line, catch_exceptions=False)
    assert error.value.field == "report"


def test_other_kinds_of_plots_are_refused(refused):
    with refused():
        console.check_files(None, plot="x.gif")
