"""GGUF files are read as the dense checkpoints that they were made from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import tensors
from torch import Tensor

from kvfold.convert.bench.shapes import checkpoint_subjects
from kvfold.convert.errors import InputError
from kvfold.convert.io.checkpoint import Checkpoint, Reading, open_checkpoint

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of a rotary projection in llama.cpp's order: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(source: Path, folder: Path, **metadata: float | str) -> dict[str, Tensor]:
    """A Llama ``source`` as Q8_0 (norms F32) in ``folder``/tiny.gguf; returns the tensors that it stands for."""
    config = json.loads((source / "config.json").read_text())
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_name("tiny")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count", "vocab_size"):
        getattr(writer, f"add_{key}")(config[LLAMA[key]])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), str(value))
    meant = {}
    for name, tensor in tensors(source).items():
        stored = name
        for ours, theirs in {"model.layers.": "blk.", **NAMES}.items():
            stored = stored.replace(ours, theirs)
        rotary = "q_proj" in name or "k_proj" in name
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        values = (permuted(tensor, heads) if rotary else tensor).numpy()
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            dense = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
            meant[name] = unpermuted(dense, heads) if rotary else dense
        else:
            writer.add_tensor(stored, values)
            meant[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


LLAMA = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def source(tiny_family) -> Path:
    return tiny_family("llama", num_key_value_heads=2, attention_bias=False, mlp_bias=False)


def check(checkpoint: Checkpoint, meant: dict[str, Tensor]) -> None:
    assert {*checkpoint.tensors} == {*meant}
    for name, tensor in meant.items():
        assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.raw_path(checkpoint.info(name)) is None


def test_a_folder_with_nothing_but_a_gguf_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfold.convert.io.gguf._ELEMENTS", 200)  # some rows at a time
    meant = write(source, tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m", Reading(dtype="F32"))
    check(checkpoint, meant)
    expected = json.loads((source / "config.json").read_text())
    keys = ("architectures", "model_type", "hidden_size", "num_key_value_heads", "head_dim", "vocab_size")
    assert {key: checkpoint.config[key] for key in keys} == {key: expected[key] for key in keys}
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.made_of == ("tiny.gguf (F32, Q8_0), dequantized to float32",)
    assert checkpoint.tokenizer_file == "tiny.gguf"
    rounded = open_checkpoint(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(rounded.read(name), meant[name].bfloat16())
    assert rounded.source_hash() == checkpoint.source_hash()


def test_gguf_of_a_folder_with_other_weights_and_a_config(source: Path, tmp_path: Path) -> None:
    meant = write(source, tmp_path / "m", llama__rope__scaling__type="linear")
    shutil.copytree(source, tmp_path / "m", dirs_exist_ok=True)
    assert open_checkpoint(tmp_path / "m").made_of == ()
    checkpoint = open_checkpoint(tmp_path / "m", Reading(dtype="F32", gguf="tiny.gguf"))
    check(checkpoint, meant)
    assert checkpoint.config == json.loads((source / "config.json").read_text())
    assert open_checkpoint(tmp_path / "m", Reading(gguf=str(tmp_path / "m" / "tiny.gguf"))).gguf == "tiny.gguf"
    named = open_checkpoint(tmp_path / "m" / "tiny.gguf", Reading(dtype="F32"))  # as MODEL, for every command alike
    check(named, meant)
    assert (named.origin, named.gguf) == ("tiny.gguf", "tiny.gguf")
    assert [subject.folder for subject in checkpoint_subjects([str(tmp_path / "m" / "tiny.gguf")])] == [
        str(tmp_path / "m" / "tiny.gguf")
    ]
    with pytest.raises(InputError, match=r"--gguf other.gguf: expected a GGUF file in .*, found tiny.gguf"):
        open_checkpoint(tmp_path / "m", Reading(gguf="other.gguf"))


def test_rope_scaling_without_a_config(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path / "m", llama__rope__scaling__type="linear")
    expected = (
        r"how its RoPE is scaled \(llama.rope.scaling.type\) is not in the metadata .* put the model's config.json"
    )
    with pytest.raises(InputError, match=expected):
        open_checkpoint(tmp_path / "m")


def test_files_that_are_not_read(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(
        InputError, match=r"expected one GGUF file, found 2 of them: a.gguf, b.gguf; give the one to read as M"
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"a.gguf: expected a GGUF file that transformers reads, found: "):
        open_checkpoint(tmp_path, Reading(gguf="a.gguf"))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"expected a whole file, found a part; join them by llama-gguf-split --merge"):
        open_checkpoint(tmp_path, Reading(gguf="m-00001-of-00002.gguf"))
    damaged = r"a.gguf: expected a GGUF file that transformers reads, found: a damaged or incomplete one .* again$"
    with pytest.raises(InputError, match=damaged):
        open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(InputError, match=r"--gguf a.gguf: expected a folder as MODEL, found the file .*; leave --gguf"):
        open_checkpoint(tmp_path / "a.gguf", Reading(gguf="a.gguf"))


def test_gguf_is_not_installed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(source, tmp_path / "m")
    monkeypatch.setattr("kvfold.convert.io.gguf.find_spec", lambda module: None)
    with pytest.raises(
        InputError, match=r"expected gguf to read it, found it not installed; pip install 'kvfold\[gguf\]'"
    ):
        open_checkpoint(tmp_path / "m")
