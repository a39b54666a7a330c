"""The memory that a plan announces is what a run takes; a dry run needs no weights."""

import json
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import add_demo_tokenizer, hub_config, run_conversion
from helpers.processes import run_python
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert import ConvertRequest, InputError
from kvfold.convert.conversion import memory
from kvfold.convert.conversion.memory import estimate_memory
from kvfold.convert.conversion.plan import checkpoint_from_config, make_plan

FOLD = {"to": "gqa", "kv_heads": 8}
ALONE = """
import json, sys
from kvfold.convert import ConvertRequest, convert_checkpoint
convert_checkpoint(ConvertRequest(**json.loads(sys.argv[1])))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(1024 * int(status["VmHWM"].split()[0]))
"""


@pytest.fixture(scope="module")
def config_only(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama-2-7b")
    (folder / "config.json").write_text(
        json.dumps(hub_config("meta-llama/Llama-2-7b-hf") | {"torch_dtype": "bfloat16"})
    )
    return folder


@pytest.mark.parametrize(
    ("target", "kind", "elements"),
    [(FOLD, "GQA-8", 2048), ({"to": "mla", "kv_rank": 512, "rope_dim": 64}, "MLA 512+64", 576)],
)
def test_a_config_alone_is_enough_for_a_dry_run(config_only, target, kind, elements, out):
    request = {"model": config_only, "out": out, **target}
    done = run_conversion(**request, dry_run=True)
    found = done.to_dict()
    assert found["attention"] == {"from": "MHA", "to": kind}
    assert found["cache_elements"] == {"from": 8192, "to": elements}
    assert 10 << 30 < sum(found["files"].values()) < 14 << 30
    assert f"RAM      about {found['host_memory_bytes'] / 1e9:.1f} GB needed" in done.summary()
    with pytest.raises(InputError, match="has no weights"):
        run_conversion(**request)
    assert not out.exists()


def needs(folder, on_gpu=False, target=FOLD, **options):
    request = ConvertRequest(model=folder, out="OUT", **target, **options)
    plan = make_plan(request, checkpoint_from_config(request.model))
    return estimate_memory(plan, on_gpu)


def test_hidden_states_are_in_memory(config_only):
    few, _ = needs(config_only)
    many, _ = needs(config_only, samples=4096)
    assert many > few + 4 * 3 * (4096 - 128) * 512 * 4096  # three copies in float32


def test_polishing_and_text_of_the_source_hold_the_whole_model(config_only):
    polished, _ = needs(config_only, polish=100)
    written, _ = needs(config_only, calibration="self")
    fitted, _ = needs(config_only)
    assert fitted < 2 * 6.4e9 < min(polished, written)


def test_hidden_states_stay_on_the_host_when_a_gpu_computes(config_only):
    on_cpu, nothing = needs(config_only)
    host, gpu = needs(config_only, on_gpu=True)
    assert nothing == 0 < gpu < on_cpu
    states = 4 * 4 * 128 * 512 * 4096
    assert host > states


def test_wide_layers_count_beside_a_small_vocabulary(config_only, tmp_path):
    large, _ = needs(config_only, polish=100)
    config = json.loads((config_only / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 2048}))
    small, _ = needs(tmp_path, polish=100)
    assert 0 < large - small < 2e9  # the heads alone


def test_polishing_a_model_of_8b_fits_a_gpu_of_44_gb(config_only, tmp_path):
    shape = {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    config = json.loads((config_only / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    latent = {"to": "mla", "kv_rank": 512, "rope_dim": 64}
    _, gpu = needs(tmp_path, on_gpu=True, target=latent, effort="normal")
    masters_with_moments_and_gradients = 16 * 1.55e9
    frozen = 2 * 5.64e9
    assert masters_with_moments_and_gradients + frozen < gpu < 44e9


@pytest.fixture
def check(config_only, monkeypatch):
    """Check the memory of a machine with so many free GB, of a GPU if ``gpu`` is given."""

    def check(host, gpu=None, **options):
        free = {"host": host, "gpu": gpu}
        monkeypatch.setattr(memory, "get_free_memory_bytes", lambda name: free[name] * 10**9)
        monkeypatch.setattr(memory, "uses_gpu", lambda plan: gpu is not None)
        request = ConvertRequest(model=config_only, out="OUT", **{**FOLD, **options})
        memory.check_memory(make_plan(request, checkpoint_from_config(request.model)))

    return check


@pytest.mark.parametrize(
    ("free", "options", "field", "advice"),
    [
        (2, {}, "samples", "--seq-len"),
        (2, {"samples": 100_000, "calibration": "self"}, "samples", "--seq-len"),
        # Stages that hold the whole model.
        (20, {"calibration": "self"}, "calibration", "--calibration self:0"),
        (20, {"polish": 100}, "polish", "--refine"),
    ],
)
def test_too_little_memory_is_blamed_on_the_option_that_needs_it(
    check, refused, free, options, field, advice
):
    with refused(advice, field=field):
        check(free, **options)


def test_a_gpu_that_is_too_small_is_told_from_too_little_ram(check, refused):
    check(40, 40)
    for host, advice in ((40, "--device cpu"), (6, "--seq-len")):
        with refused(advice):
            check(host, 2)
    with refused("--device cpu", "GPU"):
        check(100, 12, polish=100)


def test_a_dry_run_of_what_does_not_fit_ends_with_status_2(config_only, monkeypatch, kvfold):
    monkeypatch.setattr(memory, "get_free_memory_bytes", lambda name: 2 << 30)
    done = kvfold("convert", config_only, "OUT", "--to", "mqa", "--dry-run", status=2)
    assert "RAM " in done.stdout


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of width 768, whose fits take more than the libraries."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=768,
        intermediate_size=1024,
        num_attention_heads=12,
        num_hidden_layers=1,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    add_demo_tokenizer(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc"
)
@pytest.mark.parametrize(
    "options",
    [
        {"to": "mla", "kv_rank": 64, "rope_dim": 16, "seq_len": 64},
        {"to": "mqa", "method": "mean", "polish": 1, "seq_len": 64},
    ],
)
def test_the_peak_is_what_was_announced(options, wide, out):
    request = {
        "model": str(wide),
        "out": str(out),
        "quiet": True,
        "samples": 4,
        "precision": "float32",
        **options,
    }
    announced = run_conversion(**request, dry_run=True).to_dict()["host_memory_bytes"]
    peak = int(run_python("-c", ALONE, json.dumps(request)).stdout)
    print(f"peak {peak / 1e6:.0f} MB, announced {announced / 1e6:.0f} MB")
    assert peak < announced < 2.5 * peak
