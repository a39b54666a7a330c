from pathlib import Path

import pytest

from kvfold.convert import ConvertRequest, errors
from kvfold.convert.errors import InputError
from kvfold.convert.sizes import bytes_text, parse_size


def refused(request=ConvertRequest, **options):
    """The error of a wrong request, as the command line words it and as Python does."""
    texts = []
    for wording in (errors.as_option, errors.as_keyword):
        with errors.worded(wording), pytest.raises(InputError) as caught:
            request(**options)
        texts.append(str(caught.value))
    assert "--" not in texts[1]
    return "\n".join(texts)


def named(options):
    return " ".join(f"{name}={value}" for name, value in options.items())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("100", 100), ("7 kb", 7000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 apples", "GB", "1e3", "9" * 400])
def test_bad_sizes(text):
    assert parse_size(text) is None


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


@pytest.mark.parametrize(
    "options",
    [
        {"to": "gqa"},
        {"to": "gqa", "kv_heads": 0},
        {"to": "gqa", "kv_heads": True},
        {"to": "gqa", "kv_heads": 2, "kv_rank": 8},
        {"to": "gqa", "kv_heads": 2, "method": "svd"},
        {"to": "gqa", "kv_heads": 2, "method": "mean", "group": "similar"},
        {"to": "gpa", "kv_heads": 2},
        {"to": "mqa", "kv_heads": 4, "samples": 0, "device": "tpu", "method": "best"},  # all at once
        {"to": "mqa", "method": "mean", "calibration": "a.txt"},
        {"to": "mqa", "method": "mean", "spill": "dir"},
        {"to": "mqa", "refine": "often"},
        {"to": "mqa", "polish": -1},
        {"to": "mqa", "seed": 2**63},
        {"to": "mqa", "seq_len": 1},
        {"to": "mqa", "out": ""},
        {"to": "mqa", "model": " "},
        {"to": "mqa", "model": 3},
        {"to": "mqa", "device": "cude"},
        {"to": "mqa", "overwrite": "yes"},
        {"to": "mqa", "calibration": " "},
        {"to": "mqa", "calibration": ["a.txt", "a.txt"]},
        {"to": "mqa", "calibration": ["a.txt", "self"]},
        {"to": "mqa", "max_shard_size": "5 apples"},
        {"to": "mqa", "max_shard_size": "5"},
        {"to": "mqa", "keep_quantized": True, "dtype": "float32"},
        {"to": "mla"},
        {"to": "mla", "kv_rank": 8},
        {"to": "mla", "budget": 64, "kv_rank": 8},
        {"to": "mla", "budget": 64, "method": "svd"},
        {"to": "mla", "budget": 64, "group": "similar"},
        {"to": "mla", "budget": 64, "layout": "deepseek"},
        {"to": "mla", "budget": 64, "layout": "engine", "rotate_latent": True},
        {"to": "mla", "kv_rank": 8, "rope_dim": 8, "layout": "engine", "method": "svd"},
    ],
    ids=named,
)
def test_what_is_refused(options, told):
    told(refused(**{"model": "m", "out": "o", **options}))


def test_an_error_carries_options_and_values():
    with pytest.raises(InputError) as caught:
        ConvertRequest(model="m", out="o", to="mqa", samples=0, kv_rank=8)
    assert [(each.field, each.value) for each in caught.value.problems] == [("samples", 0), ("kv_rank", 8)]


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
