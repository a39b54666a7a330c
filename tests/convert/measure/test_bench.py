"""``kvfold bench``: models, predictions, measurements, table and plot."""

import gc
import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert import ConvertRequest, bench_checkpoints, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.commands.bench_command import format_benchmark
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.measure import bench
from kvfold.convert.measure import bench_worker as worker
from kvfold.convert.measure.bench import list_subjects, step_costs
from kvfold.convert.request import BenchRequest

RUN_IN_PROCESS = bench.run_in_process  # the fixture below replaces it for the whole module
SHORT = {
    "contexts": [16],
    "device": "cpu",
    "dtype": "float32",
    "prefill_tokens": 0,
    "seconds": 1e-3,
    "threads": 1,
}


@pytest.fixture(scope="module")
def in_process():
    """Without a process for every model: each takes seconds to import torch."""
    # What is loaded by now need not be searched for garbage between two measurements.
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_in_process", worker.run)
        yield
    gc.unfreeze()


def measured(models=(), **options):
    return bench_checkpoints(BenchRequest(models, **{**SHORT, **options}))


@pytest.fixture(scope="module")
def report(in_process):
    return measured(shape="tiny", layers=1, contexts=[32], batches=[2, 1], prefill_tokens=48)


def shape(name, layers=None, context=64):
    return list_subjects(BenchRequest(shape=name, layers=layers, contexts=(context,)))


def test_every_kind_of_a_shape_is_measured(report):
    labels = ["MHA", "GQA-2", "MLA 32 + 4, stock", "MLA 32 + 4, absorbed"]
    found = {(row.model, row.batch): row.cache_bytes for row in report.rows}
    assert list(found) == [(label, batch) for label in labels for batch in (1, 2)]
    for row in report.rows:
        assert row.cache_bytes == row.cache_bytes_formula
        assert row.decode_tokens_per_s == pytest.approx(row.batch / row.step_ms * 1e3)
        assert 0 < row.attention_ms < row.step_ms
        assert row.peak_bytes > 100 << 20
        assert row.prefill_tokens == [1, 32]
    assert {row.ratio for row in report.rows if row.model == "MHA"} == {1.0}
    assert found["MHA", 2] == 2 * 32 * 2 * 64 * 4  # K and V, slots, sequences, numbers, bytes
    assert found["GQA-2", 2] * 4 == found["MHA", 2]
    assert "absorbed: after kvfold.attention.absorb" in format_benchmark(report)
    assert found["MLA 32 + 4, absorbed", 1] == 32 * (32 + 4) * 4


@pytest.mark.usefixtures("in_process")
def test_a_static_cache_is_measured_without_its_spare_slots():
    done = measured(shape="tiny", layers=1, contexts=[32], cache="static")
    assert [row.cache_bytes for row in done.rows] == [row.cache_bytes_formula for row in done.rows]
    assert ", static cache; " in format_benchmark(done)


@pytest.mark.usefixtures("in_process")
def test_a_combination_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    options = {"shape": "tiny", "layers": 1, "contexts": [32, 64]}
    monkeypatch.setattr(worker, "free_memory", lambda device: 0)
    small, large = (row.needed_bytes for row in measured(**options).rows[:2])
    assert small < large
    monkeypatch.setattr(worker, "free_memory", lambda device: small)
    done = measured(**options)
    assert [row.ratio for row in done.rows[:2]] == [1.0, None]
    assert (done.rows[1].needed_bytes, done.rows[1].free_bytes) == (large, small)
    assert "does not fit: needs " in format_benchmark(done)
    assert "ratio" not in done.to_dict()["rows"][1]


def test_costs_of_a_step_of_a_known_shape():
    kinds = shape("llama-2-7b", 2, 8192)
    weights = (670 << 20, 540 << 20)
    memory = [step_costs(kind, weights, 4, 8192, 16).memory / (1 << 30) for kind in kinds]
    assert memory[0] == pytest.approx(1.05 * (2.62 + 8 + 4) + 0.59, rel=0.01)
    assert memory[3] < memory[1] < memory[2]
    stock, absorbed = (step_costs(kind, (10, 7), 4, 50, 3) for kind in kinds[2:])
    assert absorbed.attention_operations == 300 * 2 * 32 * (
        2 * 512 + 64
    )  # 2 layers, 50 slots, 3 sequences
    assert absorbed.operations == absorbed.attention_operations + 2 * 3 * 7
    assert absorbed.read_bytes == 300 * 576 * 4 + 28
    assert stock.attention_operations == 300 * 2 * 32 * (256 * 512 + 128 + 64 + 128)
    config = worker.AutoConfig.for_model(**shape("tiny")[3].config)
    model = worker.make_model(shape("tiny")[3], config, torch.float32, torch.device("cpu"))
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedYoutuAttention"
    total, read = worker.count_parameters(
        worker.AutoConfig.for_model(**shape("llama-2-7b")[0].config)
    )
    assert (total, total - read) == (6_738_415_616, 32000 * 4096)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("family", "target", "forms"),
    [
        (
            "llama",
            {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"},
            ["stock", "absorbed"],
        ),
        ("gpt2", {"to": "mqa", "method": "mean"}, ["stock"]),
        ("gpt_neox", {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}, ["stock"]),
    ],
)
def test_sources_and_results_are_timed_whatever_their_config_calls_the_sizes(
    tiny_family, tmp_path, family, target, forms
):
    source = str(tiny_family(family, **({"mlp_bias": False} if family == "llama" else {})))
    out = str(tmp_path / "out")
    convert_checkpoint(ConvertRequest(model=source, out=out, quiet=True, **target))
    rows = measured([source, out]).rows
    assert [row.form for row in rows] == ["stock", *forms]
    assert all(0 < row.attention_ms < row.step_ms for row in rows)
    assert all(row.cache_bytes == row.cache_bytes_formula for row in rows)
    assert rows[1].cache_bytes < rows[0].cache_bytes


@pytest.mark.slow
def test_a_model_whose_process_fails_costs_no_other_its_rows(tiny_family, tmp_path, monkeypatch):
    """The example of ``bench_checkpoints`` has a process that succeeds; here the second refuses its
    model.
    """
    monkeypatch.setattr(
        bench,
        "run_in_process",
        lambda subject, *settings: (RUN_IN_PROCESS if subject.name.endswith("bad") else worker.run)(
            subject, *settings
        ),
    )
    good = tiny_family("llama")
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    out = tmp_path / "bench.json"
    command = ["bench", good, bad, "--context", 16, "--prefill-tokens", 0, "--threads", 1]
    done = CliRunner().invoke(kvfold, list(map(str, [*command, "--json", out])))
    assert done.exit_code == 0, done.output
    first, second = json.loads(out.read_text())["rows"]
    assert (first["model"], first["cache_bytes"], first["ratio"]) == (
        str(good),
        2 * 16 * 64 * 2 * 4,
        1.0,
    )
    reason = "config.json: the installed transformers does not support model_type 'nothing'"
    assert second["failed"] == f"{bad}: {reason}"
    assert f"does not run: {reason}" in done.output


def test_where_all_models_fail_the_error_is_the_first(monkeypatch):
    def failing(subject, *settings):
        raise KvfoldError(f"{subject.label}: its process failed: out of memory")

    monkeypatch.setattr(bench, "run_in_process", failing)
    with pytest.raises(KvfoldError, match=r"^MHA: its process failed: out of memory"):
        measured(shape="tiny")


@pytest.mark.parametrize(
    "options", ["", "--shape gpt-9", "--shape tiny --context 8,x", "m --layers 2"]
)
def test_wrong_requests(options, told):
    found = CliRunner().invoke(kvfold, ["bench", *options.split()]).exception
    assert isinstance(found, InputError)
    told(found)


def test_a_second_sitting_measures_the_missing_rows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "recipes/benchmarks")
    script = importlib.import_module("measured")
    path = tmp_path / "rows.json"
    shown = []

    def rows(names, end=None):
        def missing(done):
            yield from (
                {"name": name} for name in names if name not in [row["name"] for row in done]
            )
            if end is not None:
                raise end

        return missing

    with pytest.raises(KeyboardInterrupt):
        script.continue_rows(path, {"model": "m"}, rows("ab", KeyboardInterrupt()), shown.append)
    script.continue_rows(path, {"model": "m"}, rows("abc"), shown.append)
    assert [row["name"] for row in shown] == ["a", "b", "a", "b", "c"]
    assert json.loads(path.read_text()) == {
        "model": "m",
        "rows": [{"name": name} for name in "abc"],
    }
