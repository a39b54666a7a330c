"""The recipe of docs/questions.md for a quantization that kvfold does not read: dequantized by
transformers.
"""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import tensors
from torch import Tensor

from kvfold.convert.checkpoint.folder import DEQUANTIZE
from kvfold.convert.checkpoint.opening import open_headers
from kvfold.convert.conversion.convert import convert_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.request import ConvertRequest

DOCS = Path(__file__).parents[2] / "docs" / "questions.md"
KEYS = {  # of Llama's config, by the name that GGUF has for each
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


def write_gguf(source: Path, file: Path) -> dict[str, Tensor]:
    """``source``, a tiny Llama, with matrices in 8 bits; returns the weights that are not rotary as
    they dequantize.
    """
    gguf = pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    for name, key in KEYS.items():
        getattr(writer, f"add_{name}")(config[key])
    writer.add_tokenizer_model("gpt2")
    letters = [chr(0x100 + number) for number in range(config["vocab_size"] - 1)]
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_merges([" ".join(letters[:2])])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    meant = {}
    for name, tensor in tensors(source).items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            packed = gguf.quantize(tensor.numpy(), bits := gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, packed, raw_dtype=bits)
            meant[name] = torch.from_numpy(gguf.dequantize(packed, bits)).bfloat16()
        else:
            writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor for name, tensor in meant.items() if not re.search("q_proj|k_proj", name)}


@pytest.mark.skipif(
    metadata.version("transformers") < "5.23",
    reason="older versions hand merges over as tokenizers 0.23 refuses them",
)
def test_a_gguf_model_is_dequantized_by_transformers_then_converted(
    tiny_family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the page, as it stands there; GGUF permutes rotary rows, so those matrices are
    not compared.
    """
    monkeypatch.chdir(tmp_path)
    Path("MODEL").mkdir()
    source = tiny_family("llama", num_key_value_heads=4, attention_bias=False, mlp_bias=False)
    meant = write_gguf(source, Path("MODEL/FILE.gguf"))
    with pytest.raises(InputError, match=re.escape(DEQUANTIZE)):
        open_headers("MODEL")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    dense = tensors(Path("DENSE"))
    assert meant
    assert all(torch.equal(dense[name], tensor) for name, tensor in meant.items())
    convert_checkpoint(ConvertRequest("DENSE", "OUT", to="mqa", method="mean", quiet=True))
    values = "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(
        tensors(Path("OUT"))[values], dense[values].float().unflatten(0, (4, -1)).mean(0).bfloat16()
    )
    assert list(Path("OUT").glob("tokenizer*"))
