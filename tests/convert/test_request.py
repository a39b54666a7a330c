from pathlib import Path

import pytest

from kvfold.convert import ConvertRequest
from kvfold.convert.errors import InputError
from kvfold.convert.sizes import bytes_text, parse_size


def refused(**options):
    with pytest.raises(InputError) as caught:
        ConvertRequest(**{"model": "m", "out": "o", "to": "gqa", "kv_heads": 2, **options})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("100", 100), ("7 kb", 7000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 apples", "GB", "1e3", "9" * 400])
def test_bad_sizes(text):
    assert parse_size(text) is None
    message = f"--max-shard-size: expected a size such as 5GB, 500MB or 2GiB, found {text!r}"
    assert message in refused(max_shard_size=text)


def test_paths_may_be_path_objects():
    request = ConvertRequest(model=Path("a") / "b", out=Path("c"), to="mqa", calibration=Path("text.txt"))
    assert (request.model, request.out, request.calibration) == (str(Path("a") / "b"), "c", "text.txt")


def test_several_texts_are_a_tuple_and_one_is_itself():
    def texts(calibration):
        request = ConvertRequest(model="m", out="o", to="mqa", calibration=calibration)
        return request.calibration, request.texts

    assert texts([Path("a.txt"), "b.md"]) == (("a.txt", "b.md"), ("a.txt", "b.md"))
    assert texts(["a.txt"]) == ("a.txt", ("a.txt",))
    assert texts(()) == (None, ())


def test_the_default_layout_is_one_word(monkeypatch):
    def layout(**options):
        request = ConvertRequest(model="m", out="o", to="mla", kv_rank=8, rope_dim=8, **options)
        assert request.result_options()["layout"] == request.resolved_layout
        return request.resolved_layout

    assert layout() == "free"
    monkeypatch.setattr("kvfold.convert.request.DEFAULT_LAYOUT", "engine")
    assert [layout(), layout(method="svd"), layout(layout="free")] == ["engine", "free", "free"]


def test_defaults():
    request = ConvertRequest(model="m", out="o", to="mqa")
    assert request.resolved_method == "principal"
    assert request.calibrated
    assert request.shard_bytes == 5 * 10**9
    assert not ConvertRequest(model="m", out="o", to="mqa", method="mean").calibrated
    assert ConvertRequest(model="m", out="o", to="mqa", method="mean", refine=10).calibrated


def test_every_problem_is_reported_at_once():
    text = refused(to="mqa", kv_heads=4, samples=0, device="tpu", method="best")
    assert "--method with --to mqa: expected one of principal, mean, first, random, found 'best'" in text
    assert "--device: expected one of auto, cpu, cuda (did you mean cpu?), found 'tpu'" in text
    assert "--samples: expected a whole number of at least 1, found 0" in text
    assert "--kv-heads goes with --to gqa, found --to mqa" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": None}, "--to gqa needs --kv-heads"),
        ({"kv_heads": 0}, "--kv-heads: expected a whole number of at least 1, found 0"),
        ({"kv_heads": True}, "--kv-heads: expected a whole number of at least 1, found True"),
        ({"kv_rank": 8}, "--kv-rank goes with --to mla, found --to gqa"),
        ({"method": "svd"}, "--method with --to gqa: expected one of principal, mean, first, random, found 'svd'"),
        ({"method": "mean", "group": "similar"}, "--group similar needs --method principal, found --method mean"),
        ({"method": "mean", "calibration": "a.txt"}, "--method mean without --refine or --polish reads no text"),
        ({"refine": "often"}, "--refine: expected a number of steps or auto, found 'often'"),
        ({"polish": -1}, "--polish: expected a number of steps or auto, found -1"),
        ({"to": "mla", "kv_heads": None}, "--to mla needs --kv-rank and --rope-dim"),
        ({"to": "mla", "kv_heads": None, "kv_rank": 8}, "--to mla needs --kv-rank and --rope-dim"),
        (
            {"to": "mla", "kv_heads": None, "budget": 64, "kv_rank": 8},
            "--budget chooses --kv-rank and --rope-dim itself",
        ),
        ({"to": "mla", "kv_heads": None, "budget": 64, "method": "svd"}, "--budget chooses by measured drift"),
        ({"to": "mla", "kv_heads": None, "budget": 64, "group": "similar"}, "--group goes with --to gqa or mqa"),
        ({"seed": 2**63}, "--seed: expected a number below 2**63, found 9223372036854775808"),
        ({"out": ""}, "OUT: expected a folder to write, found an empty name"),
        ({"model": " "}, "MODEL: expected a folder or a hub id, found an empty name"),
        (
            {"to": "mla", "kv_heads": None, "budget": 64, "layout": "deepseek"},
            "--layout: expected free, the present name of this layout, found 'deepseek'",
        ),
        ({"device": "cude"}, "--device: expected one of auto, cpu, cuda (did you mean cuda?), found 'cude'"),
        ({"calibration": " "}, "--calibration: expected the name of a text file or dataset, found ' '"),
        ({"calibration": ["a.txt", "a.txt"]}, "--calibration: expected different texts, found"),
        (
            {"calibration": ["a.txt", "self"]},
            "--calibration: expected either self or names of texts, found a.txt, self",
        ),
        ({"seq_len": 1}, "--seq-len: expected a whole number of at least 2, found 1"),
    ],
)
def test_what_cannot_go_together(options, message):
    assert message in refused(**options)


def test_options_that_only_say_how_to_run_are_not_recorded():
    options = ConvertRequest(model="/home/someone/m", out="/tmp/o", to="mqa", quiet=True).result_options()
    assert options["to"] == "mqa"
    assert options["method"] == "principal"
    assert not {"model", "out", "quiet", "device", "overwrite", "resume", "dry_run"} & set(options)
    assert not {"allow_growth", "trust_remote_code"} & set(options)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"method": "mean"}, False),
        ({"method": "random"}, True),
        ({}, True),
        ({"method": "mean", "refine": 5}, True),
        ({"method": "mean", "polish": 5}, True),
    ],
)
def test_a_seed_is_recorded_where_something_is_drawn(options, recorded):
    assert ("seed" in ConvertRequest(model="m", out="o", to="mqa", seed=3, **options).result_options()) == recorded


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5_250_000_000, "5.2 GB"), (10**12, "1.0 TB")],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count, text):
    assert bytes_text(count) == text
