"""``kvfold bench``: models, measurements and table."""

import pytest
import torch
from helpers.checkpoints import read_json, run_conversion
from helpers.processes import run_kvfold

from kvfold.convert import bench_checkpoints
from kvfold.convert.commands.bench_command import format_benchmark
from kvfold.convert.measure import bench
from kvfold.convert.request import BenchRequest

SHORT = {"device": "cpu", "dtype": "float32", "prefill_tokens": 0, "seconds": 1e-3, "quiet": True}


def measure(**options):
    return bench_checkpoints(BenchRequest(shape="tiny", layers=1, **{**SHORT, **options}))


def test_every_kind_of_a_shape_is_measured():
    benchmark = measure(contexts=[32], batches=[2, 1], prefill_tokens=48)
    cache = {(row["model"], row["batch"]): row["cache_bytes"] for row in benchmark.rows}
    labels = ["MHA", "GQA-2", "MLA 32 + 4, stock", "MLA 32 + 4, absorbed"]
    assert list(cache) == [(label, batch) for label in labels for batch in (1, 2)]
    for row in benchmark.rows:
        assert row["decode_tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert row["peak_bytes"] > 100 << 20
        assert row["prefill_tokens_per_s"] > 0
        assert row["ratio"] == 1.0 or row["model"] != "MHA"
    # Keys and values, slots, sequences, elements, bytes.
    assert cache["MHA", 2] == 2 * 32 * 2 * 64 * 4
    assert cache["GQA-2", 2] * 4 == cache["MHA", 2]
    assert cache["MLA 32 + 4, absorbed", 1] == 32 * (32 + 4) * 4
    table = format_benchmark(benchmark)
    assert max(map(len, table.splitlines()[2:])) <= 80


def test_absorbed_models_decode_over_their_latents():
    absorbed = bench.list_models_to_benchmark(BenchRequest(shape="tiny"))[3]
    model = bench.load_benchmarked_model(absorbed, torch.float32, torch.device("cpu"))
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedYoutuAttention"


def test_a_combination_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    free = 315_000  # for the weights with the cache of 32 tokens, but not of 64
    monkeypatch.setattr(bench, "measure_free_memory", lambda device: free)
    benchmark = measure(contexts=[32, 64])
    first, second = benchmark.rows[:2]
    assert first["ratio"] == 1.0
    assert second["failed"].endswith("315.0 kB is free")
    assert "does not run: needs " in format_benchmark(benchmark)


def test_a_model_that_runs_out_of_memory_costs_only_its_rows(monkeypatch):
    time_combination = bench._time_context_and_batch

    def fail_for_gqa(model, *settings):
        if model.config.num_key_value_heads == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return time_combination(model, *settings)

    monkeypatch.setattr(bench, "_time_context_and_batch", fail_for_gqa)
    rows = measure(contexts=[16]).rows
    assert [row.get("failed") for row in rows] == [None, "out of memory", None, None]


@pytest.mark.parametrize(
    ("family", "target", "forms"),
    [
        ("llama", "mla", ["stock", "stock", "absorbed"]),
        ("gpt2", "mqa", ["stock", "stock"]),
        ("gpt_neox", "mla", ["stock", "stock"]),
    ],
)
def test_sources_and_results_are_timed(tiny_family, tmp_path, out, family, target, forms):
    options = {"to": "mqa", "method": "mean"}
    if target == "mla":
        options = {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}
    source = str(tiny_family(family, **({"mlp_bias": False} if family == "llama" else {})))
    run_conversion(source, out, **options)
    file = tmp_path / "bench.json"
    command = ["bench", source, out, "--context", 16, "--prefill-tokens", 0, "--seconds", 1e-3]
    run_kvfold(*command, "--json", file)
    rows = read_json(file)["rows"]
    assert [row["form"] for row in rows] == forms
    assert rows[0]["ratio"] == 1.0
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"] == 2 * 2 * 16 * 64 * 4


def test_a_shape_that_is_none_is_refused(refused):
    with refused():
        run_kvfold("bench", "--shape", "gpt-9")
