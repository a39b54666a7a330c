"""``kvfold bench``: models, predictions, measurements, table and plot."""

import json
from dataclasses import replace

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
from kvfold.convert.measure.bench_models import (
    BenchOptions,
    BenchTask,
    ParameterCount,
    Subject,
    checkpoint_subjects,
    shape_subjects,
    step_costs,
)
from kvfold.convert.measure.figures import decoding_speed, short_names

RUN_IN_PROCESS = bench.run_in_process
QUICK = BenchOptions((32,), (2, 1), "cpu", "float32", prefill_tokens=48, seconds=0.01, threads=1)
SHORT = replace(QUICK, contexts=(16,), batches=(1,), prefill_tokens=0)


@pytest.fixture(scope="module", autouse=True)
def in_process():
    """Without a process for every model: each takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "run_in_process", lambda task: worker.run(task))
        yield


def measured(chosen, options=SHORT):
    return bench.bench(chosen, options, lambda text: None)


@pytest.fixture(scope="module")
def report():
    return measured(shape_subjects("tiny", None, 64), QUICK)


def test_every_kind_of_a_shape_is_measured(report):
    labels = ["MHA", "GQA-2", "MLA 32 + 4, stock", "MLA 32 + 4, absorbed"]
    assert list(dict.fromkeys(row.model for row in report.rows)) == labels
    assert len(report.rows) == 4 * 2
    for row in report.rows:
        assert row.cache_bytes == row.cache_bytes_formula
        assert row.decode_tokens_per_s == pytest.approx(row.batch / row.step_ms * 1e3)
        assert row.attention_ms > 0
        assert row.prefill_tokens == [1, 32]
    assert {row.ratio for row in report.rows if row.model == "MHA"} == {1.0}
    found = {(row.model, row.context, row.batch): row.cache_bytes for row in report.rows}
    assert found["MHA", 32, 2] == 2 * 32 * 2 * 64 * 2 * 4  # K and V, slots, sequences, numbers, layers, bytes
    assert found["GQA-2", 32, 2] * 4 == found["MHA", 32, 2]
    assert found["MLA 32 + 4, absorbed", 32, 1] == 32 * (32 + 4) * 2 * 4


def test_static_caches_are_counted_at_the_context():
    rows = measured(shape_subjects("tiny", None, 32), replace(SHORT, batches=(2,), cache="static")).rows
    assert all(row.cache_bytes == row.cache_bytes_formula for row in rows)
    assert all(row.prefill_tokens_per_s is None for row in rows)


def test_a_combination_that_does_not_fit_is_a_row_that_says_so(monkeypatch):
    chosen = shape_subjects("tiny", None, 64)[:1]
    options = replace(SHORT, contexts=(32, 64))
    monkeypatch.setattr(worker, "free_memory", lambda device: 0)
    small, large = (row.needed_bytes for row in measured(chosen, options).rows)
    assert small < large
    monkeypatch.setattr(worker, "free_memory", lambda device: small)
    done = measured(chosen, options)
    assert [row.ratio for row in done.rows] == [1.0, None]
    assert (done.rows[1].needed_bytes, done.rows[1].free_bytes) == (large, small)
    assert "does not fit: needs " in done.table()
    assert "ratio" not in done.to_dict()["rows"][1]


def test_a_model_that_fails_does_not_take_the_others_with_it(monkeypatch):
    run = bench.run_in_process

    def failing(task):
        if task.subject.label == "GQA-2":
            raise KvfoldError("GQA-2: its process failed: out of memory")
        return run(task)

    monkeypatch.setattr(bench, "run_in_process", failing)
    chosen = shape_subjects("tiny", 1, 8)[:2]
    done = measured(chosen)
    assert [(row.failed is None, row.ratio) for row in done.rows] == [(True, 1.0), (False, None)]
    assert "does not run: its process failed: out of memory" in done.table()
    with pytest.raises(KvfoldError, match="out of memory"):
        measured(chosen[1:])


def test_costs_of_a_step_of_a_known_shape():
    mha, gqa, stock, absorbed = shape_subjects("llama-2-7b", 2, 8192)
    weights = ParameterCount(670 << 20, 540 << 20)
    kinds = (mha, gqa, stock, absorbed)
    memory = [step_costs(s.config, s.form, weights, 4, 8192, 16).memory / (1 << 30) for s in kinds]
    assert memory[0] == pytest.approx(1.05 * (2.62 + 8 + 4) + 0.59, rel=0.01)
    assert memory[3] < memory[1] < memory[2]
    found = step_costs(absorbed.config, absorbed.form, ParameterCount(10, 7), 4, 50, 3)
    assert found.attention_operations == 300 * 2 * 32 * (2 * 512 + 64)  # 2 layers, 50 slots, 3 sequences
    assert found.operations == found.attention_operations + 2 * 3 * 7
    assert found.read_bytes == 300 * 576 * 4 + 28
    expanded = step_costs(stock.config, stock.form, ParameterCount(10, 7), 4, 50, 3)
    assert expanded.attention_operations == 300 * 2 * 32 * (256 * 512 + 128 + 64 + 128)
    whole = shape_subjects("llama-2-7b", None, 64)[0]
    counted = worker.count_parameters(worker.AutoConfig.for_model(**whole.config))
    assert (counted.total, counted.total - counted.read) == (6_738_415_616, 32000 * 4096)


def test_decoding_starts_from_seeded_random_values():
    subject = shape_subjects("tiny", None, 64)[3]
    config = worker.AutoConfig.for_model(**subject.config)
    model = worker.make_model(subject, config, torch.float32, torch.device("cpu"))
    first, second = (worker.filled_cache(model, "dynamic", 16, 2).layers[1].keys for _ in range(2))
    assert first.shape == (2, 1, 16, 32)
    assert torch.equal(first, second)
    assert first.std() == pytest.approx(1, abs=0.1)
    assert type(model.model.layers[0].self_attn).__name__ == "AbsorbedYoutuAttention"


def test_quantized_checkpoints_are_timed_dequantized(tiny_family, tmp_path):
    source, block = tiny_family("qwen3"), (16, 16)
    twin = quantized_copy(source, tmp_path / "fp8", fp8_settings(block), fp8_blocks(block))
    (subject,) = checkpoint_subjects([str(tmp_path / "fp8")])
    assert "quantization_config" not in subject.config
    model = worker.make_model(subject, None, torch.bfloat16, torch.device("cpu"))
    expected = stock_model(twin, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_checkpoints_and_the_command_line(tiny_family, tmp_path, monkeypatch):
    folder = str(tiny_family("llama"))
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    command = ["bench", folder, "--context", "16", "--batch", "1", "--prefill-tokens", "0", "--threads", "1"]
    monkeypatch.setattr(bench, "run_in_process", RUN_IN_PROCESS)
    done = CliRunner().invoke(kvfold, [*command, "--json", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["rows"][0]
    assert row["model"] == folder
    assert row["cache_bytes"] == 2 * 16 * 64 * 2 * 4
    assert row["peak_bytes"] > 100 << 20
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decode tok/s" in done.output


def test_latent_checkpoints_run_in_both_forms(tmp_path):
    subject = shape_subjects("tiny", None, 64)[2]
    config = worker.AutoConfig.for_model(**subject.config)
    worker.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    done = measured(checkpoint_subjects([str(tmp_path)]))
    assert [(row.model, row.form) for row in done.rows] == [
        (f"{tmp_path}, {form}", form) for form in ("stock", "absorbed")
    ]
    assert [row.cache_bytes for row in done.rows] == [16 * 36 * 2 * 4] * 2


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("gpt2", {"to": "mqa", "method": "mean"}),
        ("gpt_neox", {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}),
    ],
)
def test_families_with_names_of_their_own_are_timed(tiny_family, tmp_path, family, target):
    source, out = str(tiny_family(family)), str(tmp_path / "out")
    convert_checkpoint(ConvertRequest(model=source, out=out, quiet=True, **target))
    rows = measured(checkpoint_subjects([source, out])).rows
    assert all(0 < row.attention_ms < row.step_ms for row in rows)
    assert all(row.cache_bytes == row.cache_bytes_formula for row in rows)
    assert rows[1].cache_bytes < rows[0].cache_bytes


def test_the_legend_has_names_rather_than_paths():
    assert short_names(["/models/llama", "/results/mla/"]) == ["llama", "mla"]
    assert short_names(["/a/b/model", "/a/c/model"]) == ["b/model", "c/model"]
    labels = ["org/name", "MHA (absorbed)", "/a/out (absorbed)"]
    assert short_names(labels) == ["name", "MHA (absorbed)", "out (absorbed)"]


def test_the_plot_has_a_bar_of_the_right_height_for_every_row(report):
    values = report.to_dict()
    missing = {"model": "MHA", "context": 1 << 20, "batch": 1, "needed_bytes": 2, "free_bytes": 1}
    speed, cache = decoding_speed({**values, "rows": [*values["rows"], missing]}).figure.axes
    pairs = [(32, 1), (32, 2), (1 << 20, 1)]
    assert [label.get_text() for label in speed.get_xticklabels()] == [f"{c} × {b}" for c, b in pairs]
    found = {(row.model, row.context, row.batch): row for row in report.rows}
    for axes, key, unit in ((speed, "decode_tokens_per_s", 1), (cache, "cache_bytes", 1000)):
        for model, bars in zip(dict.fromkeys(row.model for row in report.rows), axes.containers, strict=True):
            expected = [getattr(found[model, *pair], key) / unit if (model, *pair) in found else 0 for pair in pairs]
            assert [bar.get_height() for bar in bars] == pytest.approx(expected)
        assert [text.get_text() for text in axes.texts].count("no fit") == len(axes.containers)


@pytest.mark.parametrize(
    "options", ["", "--shape gpt-9", "--shape tiny --context 8,x", "m --layers 2", "--shape tiny --plot a.txt"]
)
def test_wrong_requests(options, told):
    found = CliRunner().invoke(kvfold, ["bench", *options.split()]).exception
    assert isinstance(found, InputError)
    told(found)


@pytest.mark.slow
def test_a_model_that_cannot_run_is_an_error_that_names_it(tmp_path):
    subject = Subject("broken", "stock", {"model_type": "llama", "num_hidden_layers": 1}, str(tmp_path / "none"))
    with pytest.raises(KvfoldError, match=r"^broken: its process failed: \S+"):
        RUN_IN_PROCESS(BenchTask(subject, SHORT, "cpu", "float32", 0))


def test_results_say_what_they_hold_for():
    conditions = machine.conditions()
    assert list(conditions) == ["date", "machine", "versions"]
    assert conditions["machine"]["processor"] == machine.processor()
    assert conditions["versions"]["torch"] == torch.__version__


def test_a_second_sitting_measures_the_missing_rows(tmp_path):
    path, shown = tmp_path / "rows.json", []

    def rows(names, end=None):
        def missing(done):
            for name in names:
                if name not in [row["name"] for row in done]:
                    yield {"name": name}
            if end is not None:
                raise end

        return missing

    with pytest.raises(KeyboardInterrupt):
        machine.continue_rows(path, {"model": "m"}, rows("ab", KeyboardInterrupt()), shown.append)
    machine.continue_rows(path, {"model": "m"}, rows("abc"), shown.append)
    assert [row["name"] for row in shown] == ["a", "b", "a", "b", "c"]
    assert json.loads(path.read_text()) == {"model": "m", "rows": [{"name": name} for name in "abc"]}
