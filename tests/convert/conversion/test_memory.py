"""The memory that a plan announces is what a run takes; a dry run needs no weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert import ConvertRequest, InputError, convert_checkpoint
from kvfold.convert.conversion.memory import Needs, needs_of
from kvfold.convert.conversion.plan import described, make_plan
from kvfold.convert.data import demo_folder

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}
FOLD = {"to": "gqa", "kv_heads": 8}
ALONE = """
import json, sys
from kvfold.convert import ConvertRequest, convert_checkpoint
convert_checkpoint(ConvertRequest(**json.loads(sys.argv[1])))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(1024 * int(status["VmHWM"].split()[0]))
"""


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-2-7b")
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


@pytest.mark.parametrize(
    ("target", "kind", "elements"),
    [(FOLD, "GQA-8", 2048), ({"to": "mla", "kv_rank": 512, "rope_dim": 64}, "MLA 512+64", 576)],
    ids=["gqa", "mla"],
)
def test_a_config_alone_is_enough_for_a_dry_run(
    config_only: Path, target: dict[str, Any], kind: str, elements: int, tmp_path: Path
) -> None:
    request = {"model": config_only, "out": tmp_path / "out", **target}
    done = convert_checkpoint(ConvertRequest(**request, dry_run=True))
    found = done.to_dict()
    assert found["attention"] == {"from": "MHA", "to": kind}
    assert found["cache_elements_per_token_per_layer"] == {"from": 8192, "to": elements}
    assert 10 << 30 < sum(found["files"].values()) < 14 << 30
    assert f"memory: about {found['memory_bytes'] / 1e9:.1f} GB needed" in done.summary()
    with pytest.raises(InputError, match="found no weights"):
        convert_checkpoint(ConvertRequest(**request))
    assert not (tmp_path / "out").exists()


def needs(folder: Path, processes: int = 1, **options: Any) -> Needs:
    request = ConvertRequest(model=folder, out="OUT", **{**FOLD, **options})
    source = described(request)
    assert source is not None
    return needs_of(make_plan(request, source), processes)


def test_hidden_states_are_in_memory_or_on_disk(config_only: Path) -> None:
    few, many = needs(config_only), needs(config_only, samples=4096)
    assert many.memory > few.memory + 4 * 3 * (4096 - 128) * 512 * 4096  # three copies in float32
    assert few.spilled == few.scratch == 0
    some, more = needs(config_only, spill="."), needs(config_only, samples=4096, spill=".")
    assert more.memory == some.memory < few.memory
    assert more.spilled == pytest.approx(32 * some.spilled)
    assert needs(config_only, 4, samples=4096, spill=".").spilled < more.spilled / 2


def test_polishing_and_text_of_the_source_hold_the_whole_model(config_only: Path) -> None:
    weights = 4 * 6.4e9  # Llama-2-7B in float32
    plain, polished, written = (
        needs(config_only, **each) for each in ({}, {"polish": 100, "resume": True}, {"calibration": "self"})
    )
    assert plain.memory < weights < min(polished.memory, written.memory)
    assert polished.scratch > 4 * 1e9


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of width 1024, whose fits take more than the libraries, with the tokenizer that ships."""
    folder = tmp_path_factory.mktemp("wide")
    vocabulary = json.loads((demo_folder() / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=2,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in demo_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    "options",
    [
        {"to": "gqa", "kv_heads": 4, "method": "mean"},
        {"to": "mla", "kv_rank": 256, "rope_dim": 64, "method": "svd"},
        {"to": "mqa", "samples": 16, "seq_len": 256},
        {"to": "mla", "kv_rank": 256, "rope_dim": 64, "samples": 16, "seq_len": 256},
        {"to": "mqa", "samples": 16, "seq_len": 256, "polish": 4},
    ],
    ids=["pooled", "svd", "fold", "latent", "polished"],
)
def test_the_peak_is_what_was_announced(options: dict[str, Any], wide: Path, tmp_path: Path) -> None:
    request = {"model": str(wide), "out": str(tmp_path / "out"), "quiet": True, **options}
    announced = convert_checkpoint(ConvertRequest(**request, dry_run=True)).to_dict()["memory_bytes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", ALONE, json.dumps(request)]
    peak = int(subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout)
    print(f"peak {peak / 1e6:.0f} MB, announced {announced / 1e6:.0f} MB")
    assert peak < announced < 2.5 * peak
