"""``kvfold bench``: models, predictions, measurements, table and plot."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from helpers.checkpoints import stock_model
from helpers.quantized import fp8_blocks, fp8_settings, quantized_copy

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.measure import bench, machine
from kvfold.convert.measure import bench_worker as worker
from kvfold.convert.measure.bench_costs import Weights, costs
from kvfold.convert.measure.bench_models import SHAPES, Subject, checkpoint_subjects, shape_subjects
from kvfold.convert.sizes import bytes_text

RUN_IN_PROCESS = bench.run_in_process
QUICK = bench.Options((64, 32), (2, 1), "cpu", "float32", prefill_tokens=48, seconds=0.01, threads=1)


@pytest.fixture(scope="module")
def in_process():
    """Without a process for every model: each takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_in_process", lambda task: worker.run(task))
        yield


@pytest.fixture(scope="module")
def report(in_process):
    return bench.bench(bench.subjects([], "tiny", None, 64), QUICK, lambda text: None)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_what_does_not_fit_is_a_row_that_says_so(in_process, monkeypatch):
    chosen = bench.subjects([], "tiny", None, 64)[:1]
    options = replace(QUICK, contexts=(32, 64), batches=(1,), prefill_tokens=0)
    monkeypatch.setattr(worker, "free_memory", lambda device: 0)
    needed = [row["needed_bytes"] for row in bench.bench(chosen, options, lambda text: None)["rows"]]
    assert needed[0] < needed[1]
    monkeypatch.setattr(worker, "free_memory", lambda device: needed[0])
    report = bench.bench(chosen, options, lambda text: None)
    assert ["decode_tokens_per_s" in row for row in report["rows"]] == [True, False]
    assert ["ratio" in row for row in report["rows"]] == [True, False]
    texts = [bytes_text(count) for count in (needed[1], needed[0])]
    assert "does not fit: needs {}, {} free".format(*texts) in bench.bench_table(report)


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
    config = worker.AutoConfig.for_model(**subject.config)
    model = worker.load_model(subject, config, torch.float32, torch.device("cpu"))
    caches = [worker.filled_cache(model, "dynamic", 16, 2, 20) for _ in range(2)]
    first, second = (cache.layers[1].keys for cache in caches)
    assert first.shape == (2, 1, 16, 32)
    assert torch.equal(first, second)
    assert first.std() == pytest.approx(1, abs=0.1)
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedYoutuAttention"


def test_quantized_checkpoints_are_timed_dequantized(tiny_family, tmp_path):
    source, block = tiny_family("qwen3"), (16, 16)
    twin = quantized_copy(source, tmp_path / "fp8", fp8_settings(block), fp8_blocks(block))
    (subject,) = checkpoint_subjects([str(tmp_path / "fp8")])
    assert "quantization_config" not in subject.config
    model = worker.load_model(subject, None, torch.bfloat16, torch.device("cpu"))
    expected = stock_model(twin, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_checkpoints_and_the_command_line(tiny_family, tmp_path, monkeypatch):
    folder = str(tiny_family("llama"))
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    command = ["bench", folder, "--context", "16", "--batch", "1", "--prefill-tokens", "0", "--threads", "1"]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "run_in_process", RUN_IN_PROCESS)
    done = CliRunner().invoke(kvfold, [*command, "--json", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["rows"][0]
    assert row["model"] == folder
    assert row["cache_bytes"] == 2 * 16 * 64 * 2 * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decode tok/s" in done.output


def test_latent_checkpoints_run_in_both_forms(in_process, tmp_path):
    from kvfold.convert.measure.bench_models import checkpoint_subjects

    subject = shape_subjects("tiny", None, 64)[2]
    config = worker.AutoConfig.for_model(**subject.config)
    worker.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = checkpoint_subjects([str(tmp_path)])
    assert [s.label for s in found] == [f"{tmp_path}, stock", f"{tmp_path}, absorbed"]
    rows = bench.bench(found, bench.Options((16,), (1,), "cpu", "float32", seconds=0.01, threads=1), lambda text: None)
    assert [row["cache_bytes"] for row in rows["rows"]] == [16 * 36 * 2 * 4] * 2


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("gpt2", {"to": "mqa", "method": "mean"}),
        ("gpt_neox", {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}),
    ],
)
def test_families_with_names_of_their_own_are_timed(in_process, tiny_family, tmp_path, family, target):
    source, out = str(tiny_family(family)), str(tmp_path / "out")
    convert_checkpoint(ConvertRequest(model=source, out=out, quiet=True, **target))
    options = bench.Options((16,), (1,), "cpu", "float32", seconds=0.01, threads=1)
    rows = bench.bench(checkpoint_subjects([source, out]), options, lambda text: None)["rows"]
    assert all(0 < row["attention_ms"] < row["step_ms"] for row in rows)
    assert all(row["cache_bytes"] == row["cache_bytes_formula"] for row in rows)
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"]


def test_the_legend_has_names_rather_than_paths():
    from kvfold.convert.measure.figures import short_names

    assert short_names(["/models/llama", "/results/mla/"]) == ["llama", "mla"]
    assert short_names(["/a/b/model", "/a/c/model"]) == ["b/model", "c/model"]
    assert short_names(["org/name", "MHA (absorbed)", "/a/out (absorbed)"]) == [
        "name",
        "MHA (absorbed)",
        "out (absorbed)",
    ]


def test_the_plot_has_a_bar_of_the_right_height_for_every_row(report):
    pytest.importorskip("matplotlib")
    from kvfold.convert.measure.figures import decoding_speed, short_names

    rows = [dict(row) for row in report["rows"]]
    missing = {"model": rows[0]["model"], "context": 1 << 20, "batch": 1, "needed_bytes": 2, "free_bytes": 1}
    speed, cache = decoding_speed({**report, "rows": [*rows, missing]}).figure.axes
    pairs = [(32, 1), (32, 2), (64, 1), (64, 2), (1 << 20, 1)]
    assert [label.get_text() for label in speed.get_xticklabels()] == [f"{c} × {b}" for c, b in pairs]
    assert cache.get_title(loc="left") == "cache, kB"
    found = {(row["model"], row["context"], row["batch"]): row for row in rows}
    for axes, key, unit in ((speed, "decode_tokens_per_s", 1), (cache, "cache_bytes", 1000)):
        drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
        models = list(dict.fromkeys(row["model"] for row in rows))
        assert list(drawn) == short_names(models)
        for model, heights in zip(models, drawn.values(), strict=True):
            expected = [found[model, *pair][key] / unit if (model, *pair) in found else 0 for pair in pairs]
            assert heights == pytest.approx(expected)
        texts = [text.get_text() for text in axes.texts]
        assert texts.count("no fit") == len(drawn)
        places = sorted(bar.get_x() for bars in axes.containers for bar in bars)
        assert min(after - before for before, after in pairwise(places)) > 0


def test_results_say_what_they_hold_for():
    conditions = machine.conditions()
    assert list(conditions) == ["date", "machine", "versions"]
    assert conditions["machine"]["processor"] == machine.processor()
    assert conditions["machine"]["threads"] == torch.get_num_threads()
    assert conditions["versions"]["torch"] == torch.__version__
    assert set(conditions["versions"]) == {"python", "kvfold", "torch", "transformers"}


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
    task = worker.Task(subject, (8,), (1,), "cpu", "float32", "dynamic", 0, 0.01, 1)
    with pytest.raises(KvfoldError, match=r"^broken: its process failed: \S+"):
        RUN_IN_PROCESS(task)


def test_shapes_are_those_of_the_models():
    mha = shape_subjects("llama-2-7b", None, 64)[0]
    weights = worker.count_parameters(worker.AutoConfig.for_model(**mha.config))
    assert weights.total == 6_738_415_616
    assert weights.total - weights.read == 32000 * 4096
    assert set(SHAPES) >= {"llama-2-7b", "llama-2-13b"}


def test_a_model_that_fails_does_not_take_the_others_with_it(in_process, monkeypatch):
    measured = bench.run_in_process

    def run(task):
        if task.subject.label == "GQA-2":
            raise KvfoldError("GQA-2: its process failed: out of memory")
        return measured(task)

    monkeypatch.setattr(bench, "run_in_process", run)
    chosen = [subject for subject in bench.subjects((), "tiny", 1, 8) if subject.label in ("MHA", "GQA-2")]
    report = bench.bench(chosen, replace(QUICK, contexts=(8,), batches=(1,)), lambda text: None)
    assert [("failed" in row, "ratio" in row) for row in report["rows"]] == [(False, True), (True, False)]
    assert "does not run: its process failed: out of memory" in bench.bench_table(report)
    with pytest.raises(KvfoldError, match="out of memory"):
        bench.bench(chosen[1:], replace(QUICK, contexts=(8,), batches=(1,)), lambda text: None)
