"""--keep-quantized: what a conversion only copies stays as a quantized source holds it, in stock transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import tensors
from helpers.quantized import fp8_blocks, fp8_settings, mxfp4_experts, quantized_copy

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.measure.inspect import inspect_checkpoint
from kvfold.convert.measure.verify import verify_checkpoint

BLOCK = (16, 16)
CUT = (16, 20)  # no side of 48 or 64 has whole blocks of 20
LITTLE = {"calibration": "self", "samples": 2, "seq_len": 16}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # source, request, weights that are kept
    "gqa": ("llama", {"to": "gqa", "kv_heads": 2, "method": "mean"}, 2 * 3),
    "mla": ("llama", {"to": "mla", "kv_rank": 32, "rope_dim": 8, "method": "svd"}, 2 * 3),
    "experts": ("qwen3_moe", {"to": "mqa", "method": "mean"}, 3 * 4 + 3),
    "mxfp4": ("gpt_oss", {"to": "mqa", "method": "mean"}, 2 * 2),
}
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.save(model.eval()(torch.arange(3, 27)[None]).logits, f"{folder}/logits.pt")
"""


@pytest.fixture(scope="module")
def sources(tiny_family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("quantized")
    plain = tiny_family("llama", attention_bias=False, mlp_bias=False)
    experts = tiny_family("qwen3_moe", moe_intermediate_size=32, decoder_sparse_step=1, num_hidden_layers=2)
    for name, folder in (("llama", plain), ("qwen3_moe", experts)):
        quantized_copy(folder, place / name, fp8_settings(BLOCK), fp8_blocks(BLOCK))
    quantized_copy(plain, place / "cut", fp8_settings(CUT), fp8_blocks(CUT))
    mxfp4_experts(tiny_family("gpt_oss", intermediate_size=64), place / "gpt_oss")
    return {path.name: path for path in place.iterdir()}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case kept and dense, with the logits of transformers in a fresh process."""
    place = tmp_path_factory.mktemp("made")
    for name, (source, options, _) in CASES.items():
        for keep in (True, False):
            out = str(place / (name if keep else f"{name}-dense"))
            convert_checkpoint(ConvertRequest(str(sources[source]), out, keep_quantized=keep, quiet=True, **options))
    folders = [str(path) for path in sorted(place.iterdir()) if path.is_dir()]
    subprocess.run([sys.executable, "-c", LOGITS, *folders], check=True, capture_output=True)
    return place


@pytest.mark.parametrize("name", CASES)
def test_kept_weights_have_the_bytes_of_the_source(name: str, sources: dict[str, Path], made: Path) -> None:
    source, _, count = CASES[name]
    record = json.loads((made / name / "kvfold.json").read_text())
    assert record["source"]["made_of"][-1] == f"{count} of these weights kept as they are stored"
    stored, dense, found = tensors(sources[source]), tensors(made / f"{name}-dense"), tensors(made / name)
    kept = {key for key in found if key not in dense or found[key].dtype != dense[key].dtype}
    assert len(kept) == 2 * count
    assert all(torch.equal(found[key].view(torch.uint8), stored[key].view(torch.uint8)) for key in kept)
    assert all(torch.equal(found[key], dense[key]) for key in found.keys() - kept)
    assert not any(".self_attn." in key for key in kept)


@pytest.mark.parametrize("name", CASES)
def test_transformers_gives_the_logits_of_the_dense_result(name: str, made: Path) -> None:
    assert torch.equal(torch.load(made / name / "logits.pt"), torch.load(made / f"{name}-dense" / "logits.pt"))


def test_the_result_verifies_and_is_smaller(made: Path) -> None:
    (made / "mla" / "logits.pt").unlink(missing_ok=True)
    assert verify_checkpoint(made / "mla").problems == []
    sizes = {name: (made / name / "model.safetensors").stat().st_size for name in ("mla", "mla-dense")}
    assert sizes["mla"] < sizes["mla-dense"]
    card = (made / "mla" / "README.md").read_text()
    assert " --keep-quantized\n" in card
    assert "kvfold uptrain" not in card  # it trains dense weights


def test_inspect_says_of_the_result_what_the_conversion_said_of_engines(made: Path) -> None:
    for name in ("mla", "mla-dense"):
        recorded = json.loads((made / name / "kvfold.json").read_text())["engines"]
        found = {verdict.engine: verdict.serves for verdict in inspect_checkpoint(made / name).engines}
        assert found == {each["engine"]: each["serves"] for each in recorded}
    assert not {verdict.engine: verdict for verdict in inspect_checkpoint(made / "mla").engines}["mlx-lm"].serves


def test_parts_of_blocks_and_dense_sources_are_refused(sources: dict[str, Path], tiny_family, tmp_path: Path) -> None:
    for source in (sources["cut"], tiny_family("llama")):
        request = ConvertRequest(str(source), str(tmp_path / "out"), to="mqa", method="mean", keep_quantized=True)
        with pytest.raises(InputError, match="--keep-quantized needs weights outside the attention in FP8"):
            convert_checkpoint(request)
    with pytest.raises(InputError, match="--keep-quantized needs --dtype bfloat16"):
        ConvertRequest("MODEL", "OUT", to="mqa", dtype="float32", keep_quantized=True)
