"""Tiny random models with experts, and what they become, for ``recipes/serve_check.py``.

    python recipes/benchmarks/tiny_experts.py FOLDER

Makes FOLDER/mixtral, qwen3_moe, olmoe and qwen2_moe (random weights, 3 layers, 4 experts, the
tokenizer of the model that ships), and beside each its MLA results as NAME-SPLIT-LAYOUT. Random
weights say nothing of quality: the rows are about whether an engine reads the class, its router and
its experts as transformers does.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "num_experts_per_tok": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64}
SOURCES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "olmoe": {"num_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
}
STOCK = ("engine", "free")
LAYOUTS = {"mixtral": STOCK, "qwen3_moe": STOCK, "olmoe": STOCK, "qwen2_moe": ("kvfold",)}
SPLITS = ((48, 16), (512, 64))


def make(name: str, folder: Path) -> None:
    """A random model of family ``name`` with the tokenizer of the model that ships."""
    torch.manual_seed(17)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SIZES | SOURCES[name]), dtype=torch.float32
    )
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_folder() / file, folder / file)


def main(place: Path) -> None:
    for name, layouts in LAYOUTS.items():
        make(name, place / name)
        for layout in layouts:
            for rank, rope in SPLITS:
                out = place / f"{name}-{rank}-{rope}-{layout}"
                sizes: dict[str, Any] = {"kv_rank": rank, "rope_dim": rope, "layout": layout}
                text = {"samples": 4, "seq_len": 64} if layout == "engine" else {"method": "svd"}
                request = {"allow_growth": True, "overwrite": True, "quiet": True} | sizes | text
                convert_checkpoint(
                    ConvertRequest(model=str(place / name), out=str(out), to="mla", **request)
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
