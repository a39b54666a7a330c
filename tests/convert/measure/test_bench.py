"""``kvfold bench``: models, predicted costs, measurements and table."""

import gc
import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert import ConvertRequest, bench_checkpoints, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.commands.bench_command import format_benchmark
from kvfold.convert.errors import KvfoldError
from kvfold.convert.measure import bench
from kvfold.convert.measure import bench_worker as worker
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


def measure(models=(), **options):
    return bench_checkpoints(BenchRequest(models, **{**SHORT, **options}))


def list_kinds(name, layers=None):
    return bench.list_subjects(BenchRequest(shape=name, layers=layers))


@pytest.mark.usefixtures("in_process")
def test_every_kind_of_a_shape_is_measured():
    benchmark = measure(shape="tiny", layers=1, contexts=[32], batches=[2, 1], prefill_tokens=48)
    cache = {(row.model, row.batch): row.cache_bytes for row in benchmark.rows}
    labels = ["MHA", "GQA-2", "MLA 32 + 4, stock", "MLA 32 + 4, absorbed"]
    assert list(cache) == [(label, batch) for label in labels for batch in (1, 2)]
    for row in benchmark.rows:
        assert row.cache_bytes == row.cache_bytes_formula
        assert row.decode_tokens_per_s == pytest.approx(row.batch / row.step_ms * 1e3)
        assert 0 < row.attention_ms < row.step_ms
        assert row.peak_bytes > 100 << 20
        assert row.prefill_tokens == [1, 32]
        assert row.ratio == 1.0 or row.model != "MHA"
    # Keys and values, slots, sequences, elements, bytes.
    assert cache["MHA", 2] == 2 * 32 * 2 * 64 * 4
    assert cache["GQA-2", 2] * 4 == cache["MHA", 2]
    assert cache["MLA 32 + 4, absorbed", 1] == 32 * (32 + 4) * 4
    assert "absorbed: after kvfold.attention.absorb" in format_benchmark(benchmark)


@pytest.mark.usefixtures("in_process")
def test_a_static_cache_is_measured_without_its_spare_slots():
    benchmark = measure(shape="tiny", layers=1, contexts=[32], cache="static")
    assert all(row.cache_bytes == row.cache_bytes_formula for row in benchmark.rows)
    assert ", static cache; " in format_benchmark(benchmark)


@pytest.mark.usefixtures("in_process")
def test_a_combination_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    options = {"shape": "tiny", "layers": 1, "contexts": [32, 64]}
    monkeypatch.setattr(worker, "free_memory", lambda device: 0)
    small, large = (row.needed_bytes for row in measure(**options).rows[:2])
    assert small < large
    monkeypatch.setattr(worker, "free_memory", lambda device: small)
    benchmark = measure(**options)
    first, second = benchmark.rows[:2]
    assert (first.ratio, second.ratio) == (1.0, None)
    assert (second.needed_bytes, second.free_bytes) == (large, small)
    assert "does not fit: needs " in format_benchmark(benchmark)
    assert "ratio" not in benchmark.to_dict()["rows"][1]


def test_costs_of_a_step_of_a_known_shape():
    kinds = list_kinds("llama-2-7b", 2)
    weights = (670 << 20, 540 << 20)
    memory = [bench.step_costs(kind, weights, 4, 8192, 16).memory / (1 << 30) for kind in kinds]
    assert memory[0] == pytest.approx(1.05 * (2.62 + 8 + 4) + 0.59, rel=0.01)
    assert memory[3] < memory[1] < memory[2]
    stock, absorbed = (bench.step_costs(kind, (10, 7), 4, 50, 3) for kind in kinds[2:])
    slots = 2 * 50 * 3  # layers, tokens, sequences
    assert absorbed.attention_operations == slots * 2 * 32 * (2 * 512 + 64)
    assert absorbed.operations == absorbed.attention_operations + 2 * 3 * 7
    assert absorbed.read_bytes == slots * 576 * 4 + 28
    assert stock.attention_operations == slots * 2 * 32 * (256 * 512 + 128 + 64 + 128)
    tiny = list_kinds("tiny")[3]
    config = worker.AutoConfig.for_model(**tiny.config)
    model = worker.make_model(tiny, config, torch.float32, torch.device("cpu"))
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedYoutuAttention"
    config = worker.AutoConfig.for_model(**list_kinds("llama-2-7b")[0].config)
    total, read = worker.count_parameters(config)
    assert (total, total - read) == (6_738_415_616, 32000 * 4096)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("family", "sizes", "target", "forms"),
    [
        ("llama", {"mlp_bias": False}, "mla", ["stock", "absorbed"]),
        ("gpt2", {}, "mqa", ["stock"]),
        ("gpt_neox", {}, "mla", ["stock"]),
    ],
)
def test_sources_and_results_are_timed_whatever_their_config_calls_the_sizes(
    tiny_family, tmp_path, family, sizes, target, forms
):
    options = {"to": "mqa", "method": "mean"}
    if target == "mla":
        options = {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}
    source = str(tiny_family(family, **sizes))
    out = str(tmp_path / "out")
    convert_checkpoint(ConvertRequest(model=source, out=out, quiet=True, **options))
    rows = measure([source, out]).rows
    assert [row.form for row in rows] == ["stock", *forms]
    assert all(0 < row.attention_ms < row.step_ms for row in rows)
    assert all(row.cache_bytes == row.cache_bytes_formula for row in rows)
    assert rows[1].cache_bytes < rows[0].cache_bytes


@pytest.mark.slow
def test_a_model_whose_process_fails_costs_no_other_its_rows(tiny_family, tmp_path, monkeypatch):
    """The example of ``bench_checkpoints`` has a process that succeeds; here the second refuses its
    model.
    """

    def run(subject, *settings):
        in_process = RUN_IN_PROCESS if subject.name.endswith("bad") else worker.run
        return in_process(subject, *settings)

    monkeypatch.setattr(bench, "run_in_process", run)
    good = tiny_family("llama")
    bad = shutil.copytree(good, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    out = tmp_path / "bench.json"
    command = ["bench", good, bad, "--context", 16, "--prefill-tokens", 0, "--threads", 1]
    done = CliRunner().invoke(kvfold, list(map(str, [*command, "--json", out])))
    assert done.exit_code == 0, done.output
    first, second = json.loads(out.read_text())["rows"]
    assert (first["cache_bytes"], first["ratio"]) == (2 * 16 * 64 * 2 * 4, 1.0)
    assert second["failed"].startswith(f"{bad}: config.json: ")
    assert "does not run: config.json: " in done.output


def test_where_all_models_fail_the_error_is_the_first(monkeypatch):
    def fail(subject, *settings):
        raise KvfoldError(f"{subject.label}: its process failed: out of memory")

    monkeypatch.setattr(bench, "run_in_process", fail)
    with pytest.raises(KvfoldError, match=r"^MHA: its process failed: out of memory"):
        measure(shape="tiny")


@pytest.mark.parametrize(
    "options", ["", "--shape gpt-9", "--shape tiny --context 8,x", "m --layers 2"]
)
def test_wrong_requests_are_refused(options, refused):
    with refused():
        CliRunner().invoke(kvfold, ["bench", *options.split()], catch_exceptions=False)
