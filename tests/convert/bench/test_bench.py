"""``kvfold bench``: what it runs, what it predicts, what it measures and how it says so."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from kvfold.convert.bench import run as bench
from kvfold.convert.bench import worker as bench_worker
from kvfold.convert.bench.costs import Weights, costs
from kvfold.convert.bench.shapes import SHAPES, Subject, shape_subjects
from kvfold.convert.cli import kvfold
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.sizes import bytes_text

RUN_APART = bench.run_apart
QUICK = bench.Options((64, 32), (2, 1), "cpu", "float32", prefill_tokens=48, seconds=0.01, threads=1)


@pytest.fixture(scope="module")
def in_process():
    """Without a process for every model: each takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_apart", lambda task: bench_worker.run(task))
        yield


@pytest.fixture(scope="module")
def report(in_process):
    return bench.bench(bench.subjects([], "tiny", None, 64), QUICK, lambda text: None)


def test_every_kind_of_a_shape_is_measured(report):
    labels = ["MHA", "GQA-2", "MLA 32 + 4, stock", "MLA 32 + 4, absorbed"]
    assert list(dict.fromkeys(row["model"] for row in report["rows"])) == labels
    assert len(report["rows"]) == 4 * 4
    for row in report["rows"]:
        assert row["cache_bytes"] == row["cache_bytes_formula"]
        assert row["decode_tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert row["attention_ms"] > 0
        assert row["peak_bytes"] > 100 << 20
        assert row["prefill_tokens"] == [min(row["batch"], 48 // min(48, row["context"])), min(48, row["context"])]
    assert {row["ratio"] for row in report["rows"] if row["model"] == "MHA"} == {1.0}


def test_cache_bytes_are_those_of_the_formula(report):
    found = {(row["model"], row["context"], row["batch"]): row["cache_bytes"] for row in report["rows"]}
    assert found["MHA", 64, 2] == 2 * 64 * 2 * 64 * 2 * 4  # K and V, slots, sequences, numbers, layers, bytes
    assert found["GQA-2", 64, 2] * 4 == found["MHA", 64, 2]
    assert found["MLA 32 + 4, absorbed", 32, 1] == 32 * (32 + 4) * 2 * 4


def test_static_caches_are_counted_at_the_context(in_process):
    options = bench.Options((32,), (2,), "cpu", "float32", "static", 0, 0.01, 1)
    rows = bench.bench(bench.subjects([], "tiny", None, 32), options, lambda text: None)["rows"]
    assert [row["cache_bytes"] for row in rows] == [row["cache_bytes_formula"] for row in rows]
    assert all("prefill_tokens_per_s" not in row for row in rows)


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch):
    subject = shape_subjects("tiny", None, 64)[0]
    task = bench_worker.Task(subject, (32, 64), (1,), "cpu", "float32", "dynamic", 0, 0.01, 1)
    needed = bench_worker._needed(task, bench_worker._count(bench_worker.AutoConfig.for_model(**subject.config)), 32, 1)
    monkeypatch.setattr(bench_worker, "free_memory", lambda device: needed)
    rows = bench_worker.run(task)["rows"]
    assert "decode_tokens_per_s" in rows[0]
    assert "decode_tokens_per_s" not in rows[1]
    rows = [{"model": "MHA", **row} for row in rows]
    bench._add_ratios(rows, "MHA")
    report = {"rows": rows, "device": "d", "threads": 1, "dtype": "float32", "cache": "dynamic"}
    table = bench.bench_table(report | {"kvfold": "1", "torch": "2", "transformers": "5"})
    texts = [bytes_text(count, binary=True) for count in (rows[1]["needed_bytes"], needed)]
    assert "does not fit: needs {}, {} free".format(*texts) in table


def test_prediction_of_memory_grows_with_what_is_held():
    mha, gqa, stock, absorbed = shape_subjects("llama-2-7b", 2, 8192)
    weights = Weights(670 << 20, 540 << 20)
    memory = [costs(s.config, s.form, weights, 4, 8192, 16).memory / (1 << 30) for s in (mha, gqa, stock, absorbed)]
    assert memory[0] == pytest.approx(1.05 * (2.62 + 8 + 4) + 0.59, rel=0.01)
    assert memory[3] < memory[1] < memory[2]


def test_operations_of_a_step():
    _, _, stock, absorbed = shape_subjects("llama-2-7b", 1, 8192)
    found = costs(absorbed.config, absorbed.form, Weights(10, 7), 4, 100, 3)
    assert found.attention_operations == 300 * 2 * 32 * (2 * 512 + 64)
    assert found.operations == found.attention_operations + 2 * 3 * 7
    assert found.read_bytes == 300 * 576 * 4 + 28
    expanded = costs(stock.config, stock.form, Weights(10, 7), 4, 100, 3)
    assert expanded.attention_operations == 300 * 2 * 32 * (256 * 512 + 128 + 64 + 128)


def test_decoding_starts_from_seeded_random_values():
    subject = shape_subjects("tiny", None, 64)[3]
    config = bench_worker.AutoConfig.for_model(**subject.config)
    task = bench_worker.Task(subject, (16,), (2,), "cpu", "float32", "dynamic", 0, 0.01, 1)
    model = bench_worker._load(task, config, torch.float32, torch.device("cpu"))
    caches = [bench_worker.filled_cache(model, "dynamic", 16, 2, 20) for _ in range(2)]
    first, second = (cache.layers[1].keys for cache in caches)
    assert first.shape == (2, 1, 16, 32)
    assert torch.equal(first, second)
    assert first.std() == pytest.approx(1, abs=0.1)
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedDeepseekV3Attention"


@pytest.mark.slow
def test_checkpoints_and_the_command_line(tiny_family, tmp_path, monkeypatch):
    folder = str(tiny_family("llama"))
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    command = ["bench", folder, "--context", "16", "--batch", "1", "--prefill-tokens", "0", "--threads", "1"]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "run_apart", RUN_APART)
    done = CliRunner().invoke(kvfold, [*command, "--json", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["rows"][0]
    assert row["model"] == folder
    assert row["cache_bytes"] == 2 * 16 * 64 * 2 * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decode tok/s" in done.output


def test_latent_checkpoints_run_in_both_forms(in_process, tmp_path):
    from kvfold.convert.bench.shapes import checkpoint_subjects

    subject = shape_subjects("tiny", None, 64)[2]
    config = bench_worker.AutoConfig.for_model(**subject.config)
    bench_worker.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = checkpoint_subjects([str(tmp_path)])
    assert [s.label for s in found] == [f"{tmp_path}, stock", f"{tmp_path}, absorbed"]
    rows = bench.bench(found, bench.Options((16,), (1,), "cpu", "float32", seconds=0.01, threads=1), lambda text: None)
    assert [row["cache_bytes"] for row in rows["rows"]] == [16 * 36 * 2 * 4] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvfold bench: name at least one MODEL, or a --shape such as llama-2-7b"),
        (["--shape", "gpt-9"], "--shape gpt-9: unknown; expected one of llama-2-7b, llama-2-13b, llama-2-70b, tiny"),
        (["--shape", "tiny", "--context", "8,x"], "--context 8,x: expected positive numbers separated by commas"),
        (["--shape", "tiny", "--batch", "0"], "--batch 0: expected positive numbers separated by commas"),
        (["m", "--layers", "2"], "--layers: only with --shape"),
        (["--shape", "tiny", "--plot", "a.txt"], "--plot a.txt: expected a file that ends in .png, .svg, .pdf"),
    ],
)
def test_wrong_requests(arguments, message):
    found = CliRunner().invoke(kvfold, ["bench", *arguments]).exception
    assert isinstance(found, InputError)
    assert str(found).startswith(message)


@pytest.mark.slow
def test_a_model_that_cannot_run_is_an_error_that_names_it(tmp_path):
    subject = Subject("broken", "stock", {"model_type": "llama", "num_hidden_layers": 1}, str(tmp_path / "none"))
    task = bench_worker.Task(subject, (8,), (1,), "cpu", "float32", "dynamic", 0, 0.01, 1)
    with pytest.raises(KvfoldError, match=r"^broken: its process failed: \S+"):
        RUN_APART(task)


def test_shapes_are_those_of_the_models():
    mha = shape_subjects("llama-2-7b", None, 64)[0]
    weights = bench_worker._count(bench_worker.AutoConfig.for_model(**mha.config))
    assert weights.total == 6_738_415_616
    assert weights.total - weights.read == 32000 * 4096
    assert set(SHAPES) >= {"llama-2-7b", "llama-2-13b"}


def test_a_model_that_fails_does_not_take_the_others_with_it(in_process, monkeypatch):
    measured = bench.run_apart

    def run(task):
        if task.subject.label == "GQA-2":
            raise KvfoldError("GQA-2: its process failed: out of memory")
        return measured(task)

    monkeypatch.setattr(bench, "run_apart", run)
    chosen = [subject for subject in bench.subjects((), "tiny", 1, 8) if subject.label in ("MHA", "GQA-2")]
    report = bench.bench(chosen, replace(QUICK, contexts=(8,), batches=(1,)), lambda text: None)
    assert [("failed" in row, "ratio" in row) for row in report["rows"]] == [(False, True), (True, False)]
    assert "does not run: its process failed: out of memory" in bench.bench_table(report)
    with pytest.raises(KvfoldError, match="out of memory"):
        bench.bench(chosen[1:], replace(QUICK, contexts=(8,), batches=(1,)), lambda text: None)
