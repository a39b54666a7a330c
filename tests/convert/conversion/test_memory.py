"""The memory that a plan announces is what a run takes, ``--spill`` changes no byte; a dry run
needs no weights.
"""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import forked
from helpers.cases import mostly_slow
from helpers.checkpoints import add_demo_tokenizer, hub_config
from helpers.processes import run_python
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.attention.drift import compare
from kvfold.convert import ConvertRequest, InputError, convert_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion import memory
from kvfold.convert.conversion.journal import run_settings
from kvfold.convert.conversion.memory import needs_of
from kvfold.convert.conversion.plan import described, make_plan
from kvfold.convert.data import demo_folder
from kvfold.convert.walk import passes
from kvfold.convert.walk.hidden import Spill

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
    ids=["gqa", "mla"],
)
def test_a_config_alone_is_enough_for_a_dry_run(config_only, target, kind, elements, tmp_path):
    request = {"model": config_only, "out": tmp_path / "out", **target}
    done = convert_checkpoint(ConvertRequest(**request, dry_run=True))
    found = done.to_dict()
    assert found["attention"] == {"from": "MHA", "to": kind}
    assert found["cache_elements"] == {"from": 8192, "to": elements}
    assert 10 << 30 < sum(found["files"].values()) < 14 << 30
    assert f"memory: about {found['memory_bytes'] / 1e9:.1f} GB needed" in done.summary()
    with pytest.raises(InputError, match="has no weights"):
        convert_checkpoint(ConvertRequest(**request))
    assert not (tmp_path / "out").exists()


def needs(folder, **options):
    request = ConvertRequest(model=folder, out="OUT", **{**FOLD, **options})
    return needs_of(make_plan(request, described(request)))


def test_hidden_states_are_in_memory_or_on_disk(config_only, monkeypatch):
    few = needs(config_only)
    many = needs(config_only, samples=4096)
    assert many.memory > few.memory + 4 * 3 * (4096 - 128) * 512 * 4096  # three copies in float32
    assert few.spilled == few.scratch == 0
    latent = {"to": "mla", "kv_heads": None}
    split = {"kv_rank": 512, "rope_dim": 64}
    assert (
        needs(config_only, **latent, **split).scratch
        == 0
        < needs(config_only, **latent, budget=576).scratch
    )
    some = needs(config_only, spill=".")
    more = needs(config_only, samples=4096, spill=".")
    assert more.memory == some.memory < few.memory
    assert more.spilled == pytest.approx(32 * some.spilled)
    monkeypatch.setattr(memory.processes, "count", lambda: 4)
    assert needs(config_only, samples=4096, spill=".").spilled < more.spilled / 2


def test_polishing_and_text_of_the_source_hold_the_whole_model(config_only):
    polished = needs(config_only, polish=100)
    written = needs(config_only, calibration="self")
    assert (
        needs(config_only).memory < 4 * 6.4e9 < min(polished.memory, written.memory)
    )  # Llama-2-7B in float32


def test_a_gpu_computes_more_at_once(config_only):
    many = {"samples": 1024, "spill": "."}
    on_cpu, on_gpu = (
        needs(config_only, device=device, **many).memory for device in ("cpu", "cuda")
    )
    assert on_gpu >= on_cpu + (32768 - 4096) * 4096 * 68
    assert memory._LOGITS == (compare._CPU_LOGITS, compare._GPU_LOGITS)
    assert memory._TOKENS == (passes._CPU_TOKENS, passes._GPU_TOKENS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of width 768, whose fits take more than the libraries, with the tokenizer that ships."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_hidden_layers": 1,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, **sizes)).to(torch.bfloat16).save_pretrained(
        folder
    )
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
    ids=["latent", "polished"],
)
def test_the_peak_is_what_was_announced(options, wide, tmp_path):
    request = {
        "model": str(wide),
        "out": str(tmp_path / "out"),
        "quiet": True,
        "samples": 4,
        **options,
    }
    announced = convert_checkpoint(ConvertRequest(**request, dry_run=True)).to_dict()[
        "memory_bytes"
    ]
    peak = int(run_python("-c", ALONE, json.dumps(request)).stdout)
    print(f"peak {peak / 1e6:.0f} MB, announced {announced / 1e6:.0f} MB")
    assert peak < announced < 2.5 * peak


# --spill: hidden states on disk, the same bytes in OUT.

TARGETS = [
    {"to": "gqa", "kv_heads": 2, "group": "contiguous"},
    {"to": "mla", "kv_rank": 24, "rope_dim": 4, "refine": 1},
]


def request(tmp_path, model=None, **options):
    text = {"samples": 4, "seq_len": 24, "quiet": True}
    return ConvertRequest(
        model=model or demo_folder(), **{"out": tmp_path / "out", "to": "mqa", **text, **options}
    )


@pytest.mark.parametrize("target", mostly_slow(TARGETS, 2), ids=["gqa", "mla, refined"])
def test_a_spill_changes_no_byte_and_has_no_name(target, tiny_reader, tmp_path, monkeypatch):
    """With chunks of two sequences. A file without a name is gone with its process, however that
    ends.
    """
    monkeypatch.setattr(passes, "_CPU_TOKENS", 48)
    folder = tmp_path / "spill"
    stored = []
    folder.mkdir()
    store = Spill.store

    def counted(self, chunk):
        stored.append(list(folder.iterdir()))
        return store(self, chunk)

    monkeypatch.setattr(Spill, "store", counted)
    convert_checkpoint(request(tmp_path, tiny_reader, out=tmp_path / "plain", **target))
    assert not stored
    convert_checkpoint(request(tmp_path, tiny_reader, spill=folder, **target))
    assert len(stored) > 20
    assert not any(stored)
    assert not list(folder.iterdir())
    assert forked.snapshot(tmp_path / "out") == forked.snapshot(tmp_path / "plain")


def test_a_folder_without_room_is_told_before_any_work(tmp_path, monkeypatch):
    def refused(**options):
        with pytest.raises(InputError) as caught:
            convert_checkpoint(request(tmp_path, **options))
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert f"--spill {tmp_path / 'none'}: there is no such folder for hidden states" in refused(
        spill=tmp_path / "none"
    )
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "too little disk space: hidden states need" in refused(spill=tmp_path)
    assert "--spill has no effect" in refused(spill=tmp_path, method="mean")


def test_a_run_resumes_with_another_spill(tmp_path):
    with closing(open_checkpoint(str(demo_folder()))) as checkpoint:
        plan = make_plan(request(tmp_path), checkpoint)
        assert run_settings(
            replace(plan, request=request(tmp_path, spill=tmp_path))
        ) == run_settings(plan)
