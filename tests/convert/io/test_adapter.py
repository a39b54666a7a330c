"""A LoRA adapter is merged while tensors are read, as peft merges it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import stock_model, tensors
from safetensors.torch import save_file
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.io.checkpoint import Checkpoint, Reading, open_checkpoint

Q, K, EMBED = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.embed_tokens",
)


def make(folder: Path, parts: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "fan_in_fan_out": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file({f"base_model.model.{name}": part for name, part in parts.items()}, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, rank: int = 2, out: int = 64) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": torch.randn(rank, 64), f"{module}.lora_B.weight": torch.randn(out, rank)}


def merged(source: Path, adapter: Path) -> Checkpoint:
    return open_checkpoint(source, Reading(adapter=str(adapter)))


@pytest.fixture
def source(tiny_family) -> Path:
    return tiny_family("llama")


def test_patterns_and_scales(source: Path, tmp_path: Path) -> None:
    parts = pair(Q) | pair(K, rank=4)
    config = {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {r"layers\.1\..*k_proj": 8}}
    before, a, b = tensors(source), "lora_A.weight", "lora_B.weight"
    for rslora, scales in ((False, (3.0, 2.0)), (True, (6 / 2**0.5, 4.0))):
        checkpoint = merged(source, make(tmp_path / str(rslora), parts, use_rslora=rslora, **config))
        for module, scale in zip((Q, K), scales, strict=True):
            expected = before[f"{module}.weight"] + scale * parts[f"{module}.{b}"] @ parts[f"{module}.{a}"]
            torch.testing.assert_close(checkpoint.read(f"{module}.weight"), expected)
            assert checkpoint.info(f"{module}.weight").made == "merged"
            assert checkpoint.raw_path(checkpoint.info(f"{module}.weight")) is None
            assert torch.cat(list(checkpoint.chunks(f"{module}.weight", 100))).shape == (64 * 64,)
        rest = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(checkpoint.read(rest), before[rest])
        assert checkpoint.raw_path(checkpoint.info(rest)) == source / "model.safetensors"
        assert checkpoint.made_of == (f"the LoRA adapter {rslora}, merged into 2 weights",)
        assert checkpoint.source_hash() != open_checkpoint(source).source_hash()


def test_embeddings_and_weights_stored_input_first(source: Path, tmp_path: Path) -> None:
    embedding = {f"{EMBED}.lora_embedding_A": torch.randn(2, 97), f"{EMBED}.lora_embedding_B": torch.randn(64, 2)}
    before = tensors(source)
    found = merged(source, make(tmp_path / "e", embedding)).read(f"{EMBED}.weight")
    expected = (
        before[f"{EMBED}.weight"]
        + 3 * (embedding[f"{EMBED}.lora_embedding_B"] @ embedding[f"{EMBED}.lora_embedding_A"]).T
    )
    torch.testing.assert_close(found, expected)
    parts = pair(Q)
    found = merged(source, make(tmp_path / "c", parts, fan_in_fan_out=True)).read(f"{Q}.weight")
    expected = before[f"{Q}.weight"] + 3 * (parts[f"{Q}.lora_B.weight"] @ parts[f"{Q}.lora_A.weight"]).T
    torch.testing.assert_close(found, expected)


def test_as_peft_merges(source: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj", "down_proj", "embed_tokens"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"layers.1.self_attn.v_proj": 9},
        use_rslora=True,
    )
    model = peft.get_peft_model(stock_model(source), config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    checkpoint = merged(source, tmp_path / "a")
    expected = model.merge_and_unload().state_dict()
    assert sum(info.made == "merged" for info in checkpoint.tensors.values()) == 7
    for name in checkpoint.tensors:
        torch.testing.assert_close(checkpoint.read(name), expected[name])


def problem(source: Path, adapter: Path) -> str:
    with pytest.raises(InputError) as caught:
        merged(source, adapter)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head']"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"something_new": {"a": 1}}, "something_new {'a': 1}"),
    ],
)
def test_what_is_not_plain_lora(source: Path, tmp_path: Path, config: dict[str, Any], found: str) -> None:
    text = problem(source, make(tmp_path / "a", pair(Q), **config))
    assert f"expected plain LoRA, found {found}; merge it with peft first (model.merge_and_unload()" in text


def test_adapters_of_other_models(source: Path, tmp_path: Path) -> None:
    parts = pair(Q, out=32) | pair("model.layers.7.self_attn.q_proj")
    text = problem(source, make(tmp_path / "a", parts))
    assert f"--adapter a: expected an adapter of this model, found {Q}: expected [32, 64], found F32 [64, 64]" in text
    assert "model.layers.7.self_attn.q_proj: expected a weight of that name in the model, found none" in text


def test_tensors_that_are_no_pair(source: Path, tmp_path: Path) -> None:
    text = problem(
        source, make(tmp_path / "a", {f"{Q}.lora_A.weight": torch.ones(2, 64), f"{Q}.weight": torch.ones(2)})
    )
    assert f"{Q}: expected A [r, in] and B [out, r], found {{'A': [2, 64]}}" in text
    assert f"expected plain LoRA, found a tensor 'base_model.model.{Q}.weight'; merge it with peft first" in text


def test_folders_that_are_no_adapter_or_no_model(source: Path, tmp_path: Path) -> None:
    assert "expected a folder with adapter_config.json, found none" in problem(source, source)
    folder = make(tmp_path / "a", pair(Q))
    with pytest.raises(InputError, match=r"found a PEFT adapter; give its base model as MODEL, and --adapter "):
        open_checkpoint(folder)
    folder = make(tmp_path / "b", pair(Q), base_model_name_or_path="team/base")
    with pytest.raises(InputError, match=rf": kvfold convert team/base OUT --adapter {folder} \.\.\."):
        open_checkpoint(folder)
