"""What a checkpoint is and what it can become, from its config and headers. Imports neither torch nor transformers."""

import math
from collections.abc import Mapping
from typing import Any

from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.tensors import ROLES
from kvfold.convert.io.checkpoint import Checkpoint, open_headers
from kvfold.convert.io.headers import DTYPE_BITS, FLOAT_DTYPES
from kvfold.convert.sizes import bytes_text
from kvfold.convert.targets.deepseek.problems import model_problems
from kvfold.convert.targets.same_family import attention_kind, cache_elements

CONTEXTS = {"8k": 8192, "128k": 131072}
LATENT_TYPES = ("deepseek_v2", "deepseek_v3")
_PARTS = (4, 8)  # shares of the present cache that are offered as MLA budgets


def inspect_checkpoint(model: str) -> dict[str, Any]:
    """Facts about ``model`` (a folder or hub id; headers only) as plain JSON values. Bytes are for one sequence.

    Raises InputError when there is no such checkpoint, its files are damaged, or its family is not supported.
    """
    checkpoint = open_headers(model)
    try:
        return _facts(checkpoint)
    finally:
        checkpoint.close()


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    if config.get("model_type") in LATENT_TYPES:
        return _latent_facts(checkpoint)
    model = model_of(config)
    problems = model.tensor_problems(checkpoint.tensors)
    if problems:
        raise InputError(f"{checkpoint.origin}: its tensors are not those that its config.json asks for", problems)
    family, geometry, layers = model.family, model.geometry, model.layers
    dtype = _dtype(checkpoint)
    windows = [layer.window for layer in layers]
    return {
        "model": checkpoint.origin,
        "family": family.model_type,
        "architecture": family.architecture,
        "attention": attention_kind(geometry.heads, geometry.kv_heads),
        "layers": geometry.layers,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "model_dim": geometry.model_dim,
        "biases": [role for role in ROLES if model.has_bias(role)],
        "qk_norm": model.qk_norm.kind if model.qk_norm else None,
        "rotary_dims": geometry.rotary_dims,
        "rotary_layers": sum(layer.rotates for layer in layers),
        "rope": model.rope_table(layers[0].type)["rope_type"],
        "windows": sorted({window for window in windows if window is not None}),
        "max_context": geometry.positions,
        **_weights(checkpoint, dtype),
        "cache": _cache(cache_elements(geometry), windows, dtype),
        "targets": _targets(model, windows, dtype),
        "latent": _latent_target(model),
    }


def _latent_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of a model whose attention is latent already: nothing can become of it, but its cache is told."""
    config, dtype = checkpoint.config, _dtype(checkpoint)
    needed = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    if missing := [key for key in (*needed, "hidden_size", "v_head_dim") if not isinstance(config.get(key), int)]:
        raise InputError(f"{checkpoint.origin}: config.json: {', '.join(missing)} must be whole numbers")
    layers, heads, rank, rope, nope = (config[key] for key in needed)
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "model": checkpoint.origin,
        "family": config["model_type"],
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "attention": "MLA",
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": nope + rope,
        "value_dim": config["v_head_dim"],
        "model_dim": config["hidden_size"],
        "kv_rank": rank,
        "q_rank": config.get("q_lora_rank"),
        "biases": ["kv_a", "o"] if config.get("attention_bias") else [],
        "qk_norm": None,
        "rotary_dims": rope,
        "rotary_layers": layers,
        "rope": rotary.get("rope_type") or rotary.get("type") or "default",
        "windows": [],
        "max_context": config.get("max_position_embeddings"),
        **_weights(checkpoint, dtype),
        "cache": _cache(rank + rope, [None] * layers, dtype),
        "targets": [],
        "latent": None,
    }


def _weights(checkpoint: Checkpoint, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "parameters": sum(math.prod(info.shape) for info in checkpoint.tensors.values()),
        "weight_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "files": len({info.file for info in checkpoint.tensors.values()}),
    }


def _latent_target(model: Model) -> dict[str, Any]:
    """Whether MLA is possible, in what limits, or what stands in the way."""
    problems = model_problems(model)
    geometry, limit = model.geometry, cache_elements(model.geometry)
    if problems:
        return {"possible": False, "because": problems}
    return {"possible": True, "numbers_below": limit, "rope_dim_up_to": geometry.rotary_dims * geometry.kv_heads}


def _dtype(checkpoint: Checkpoint) -> str:
    """The dtype that most of the weights are stored in; the cache is counted in it."""
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max((dtype for dtype in sizes if dtype in FLOAT_DTYPES), key=lambda dtype: sizes[dtype], default="F32")


def _cache(numbers: int, windows: list[int | None], dtype: str) -> dict[str, Any]:
    """Cache sizes for ``numbers`` per token and layer; a windowed layer never holds more than its window."""
    width = DTYPE_BITS[dtype] // 8

    def held(context: int) -> int:
        return sum(min(context, window or context) for window in windows) * numbers * width

    return {
        "numbers_per_token_and_layer": numbers,
        "bytes_per_token": len(windows) * numbers * width,
        "bytes": {name: held(context) for name, context in CONTEXTS.items()},
    }


def _targets(model: Model, windows: list[int | None], dtype: str) -> list[dict[str, Any]]:
    geometry, present = model.geometry, cache_elements(model.geometry)
    sizes = {
        "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}": present * kv_heads // geometry.kv_heads
        for kv_heads in possible_kv_heads(geometry)
    }
    if not model_problems(model):
        sizes |= {f"--to mla --budget {present // part}": present // part for part in _PARTS if present // part >= 4}
    return [
        {"options": options, **_cache(numbers, windows, dtype), "saves": 1 - numbers / present}
        for options, numbers in sizes.items()
    ]


def summary(facts: Mapping[str, Any]) -> str:
    """The facts as lines for a person."""
    cache = facts["cache"]
    heads = f"{facts['heads']} query heads, {facts['kv_heads']} key/value heads, head dim {facts['head_dim']}"
    if facts["attention"] == "MLA":
        heads = f"{facts['heads']} heads over a latent of {facts['kv_rank']} and a rotary key of {facts['rotary_dims']}"
    extras = [f"biases on {', '.join(facts['biases'])}"] if facts["biases"] else ["no biases"]
    extras += [f"{facts['qk_norm']} norm on queries and keys"] if facts["qk_norm"] else []
    rotary = f"{facts['rotary_dims']} of {facts['head_dim']} dims, {facts['rope']}"
    if facts["rotary_layers"] < facts["layers"]:
        rotary += f", in {facts['rotary_layers']} of {facts['layers']} layers"
    rows = {
        "family": f"{facts['family']} ({facts['architecture']})",
        "attention": f"{facts['attention']}: {heads}",
        "layers": f"{facts['layers']}, model dim {facts['model_dim']}, {', '.join(extras)}",
        "rotary": rotary,
        **({"windows": ", ".join(map(str, facts["windows"]))} if facts["windows"] else {}),
        "weights": f"{_count(facts['parameters'])} parameters, {bytes_text(facts['weight_bytes'])} "
        f"of {facts['dtype']} in {facts['files']} file{'s' if facts['files'] > 1 else ''}",
        "KV cache": f"{cache['numbers_per_token_and_layer']} numbers per token and layer, {_cache_text(cache)}",
    }
    width = max(map(len, rows))
    lines = [facts["model"], *(f"  {name:{width}}  {text}" for name, text in rows.items())]
    return "\n".join([*lines, "", *_target_lines(facts)])


def _target_lines(facts: Mapping[str, Any]) -> list[str]:
    if not facts["targets"]:
        return ["can become: nothing smaller"]
    heading = f"  {'can become':24}  {'saves':>7}  {'per token':>10}" + "".join(f"  {'at ' + c:>10}" for c in CONTEXTS)
    rows = [
        f"  {target['options']:24}  {100 * target['saves']:5.1f} %  {bytes_text(target['bytes_per_token']):>10}"
        + "".join(f"  {bytes_text(size):>10}" for size in target["bytes"].values())
        for target in facts["targets"]
    ]
    latent = facts["latent"] or {}
    return [heading, *rows, *(f"  not MLA: {reason}" for reason in latent.get("because", []))]


def _cache_text(cache: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{bytes_text(size)} at {context}" for context, size in cache["bytes"].items())
    return f"{bytes_text(cache['bytes_per_token'])} per token ({sizes})"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**9 else f"{parameters / 1e6:.1f} M"
