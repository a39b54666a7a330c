"""Find out which inference engines can serve a converted model, and propose conversions that they
can serve. Does not import torch.

``engines.json`` beside this file has every fact about engines: for each, the version, its sources,
and rows of ``when`` (an expression over the fields of `ServedModel`, see ``families/values.py``),
``answer`` and ``note``. The first row that applies counts. The answer is ``ran`` (a run with this
version compared greedy tokens with those of transformers in float32), ``read`` (the engine serves
the model according to its sources) or ``no``. ``scaled_rope`` of an engine is its answer in place
of ``ran`` for layout ``engine`` with YaRN of a factor above 1. `tests/engines` runs them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import make_older_rope_keys, read_rope_parameters
from kvfold.convert.families.values import evaluate_expression
from kvfold.convert.request import Layout
from kvfold.convert.targets.custom_code import needs_custom_code
from kvfold.convert.targets.mla.spec import (
    EXPERT_TYPE,
    KERNEL_CACHES,
    KERNEL_HEADS,
    MlaSpec,
    choose_mla_layout,
    count_cached_divisors,
    list_mla_problems,
)
from kvfold.convert.targets.same_family import count_cache_elements

_ENGINES = json.loads(Path(__file__).with_name("engines.json").read_text(encoding="utf-8"))
ENGINE_LEGEND = (
    "without *: run on a model of 5.3 M parameters in float32 on 2 CPU cores, with the tokens of"
    " transformers; *: read in the engine's source code, not run"
)
_KERNEL_SPLITS = ((512, 64), (448, 64), (256, 64))
_CACHE_DIVISORS = (2, 3, 4, 8)  # proposed caches, as parts of the source's


@dataclass(frozen=True)
class ServedModel:
    """The properties of a converted model that decide which inference engines can serve it:
    attention kind, head counts, dims, and cache sizes.

    kind: `fold` is GQA or MQA in the source's class, `free` and `engine` are the MLA layouts, and
        `own` includes its modeling code
    layers: number of layers
    query_heads: number of query heads
    kv_heads: key/value heads of a fold
    head_dim: dims of a fold's heads
    kv_rank, rope_dim: the split of MLA
    divisors: divisors of key norms that are cached next to the split
    heads: (unrotated, rotary, value) dims of stored MLA heads
    family: `model_type` of a fold
    wrapper: the model is inside a multimodal wrapper
    older_rope: ``rope_theta`` is in config.json for engines that do not read `rope_parameters`
    vocabulary: size of the vocabulary
    experts: a latent model with experts (Mistral4)
    scaled_rope: layout ``engine`` with YaRN of a factor above 1
    """

    kind: Literal["fold", "free", "engine", "own"]
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    divisors: int = 0
    heads: tuple[int, int, int] = (0, 0, 0)
    family: str = ""
    wrapper: bool = False
    older_rope: bool = True
    vocabulary: int = 0
    experts: bool = False
    scaled_rope: bool = False

    def count_cache_elements(self) -> int:
        """Return the KV-cache elements per token per layer."""
        return self.kv_rank + self.rope_dim + self.divisors or 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class EngineSupport:
    """Whether one version of an inference engine can serve a model, and how, or why not.

    engine, version: the engine
    serves: whether it serves the model
    cache: KV-cache elements per token per layer on one device, None if it does not serve the model
    how: notes on serving the model, or the reason why the engine cannot
    ran: confirmed by a run with this version
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    ran: bool

    def to_text(self) -> str:
        """Return one line for users, such as "vLLM: yes, ..." or "SGLang: no, ..." with the
        reason.
        """
        answer = "yes" if self.serves else "no"
        source = "according to its source code, not tested" if self.serves and not self.ran else ""
        return f"{self.engine}: {', '.join(filter(None, (answer, source, self.how)))}"


def name_serving_engines(engines: Sequence[EngineSupport]) -> str:
    """Return the names of the engines that serve a model, with a star where `ENGINE_LEGEND` has
    one.
    """
    names = [support.engine + "*" * (not support.ran) for support in engines if support.serves]
    return ", ".join(names) or "no engine"


def list_engine_support(model: ServedModel) -> list[EngineSupport]:
    """Return whether and how each inference engine can serve ``model``, one `EngineSupport` per
    engine.
    """
    cached = model.count_cache_elements()
    scope = {
        **vars(model),
        "cache": cached,
        "kernel_caches": KERNEL_CACHES,
        "kernel_heads": KERNEL_HEADS,
    }
    result = []
    for name, engine in _ENGINES.items():
        row = next(row for row in engine["answers"] if evaluate_expression(row["when"], scope))
        answer = row["answer"]
        if answer == "ran" and model.scaled_rope:
            answer = engine.get("scaled_rope", answer)
        serves = answer != "no"
        result.append(
            EngineSupport(
                engine=name,
                version=engine["version"],
                serves=serves,
                cache=cached if serves else None,
                how=row["note"].format(**scope),
                ran=answer == "ran",
            )
        )
    return result


def describe_folded_model(model: Model, kv_heads: int | None = None) -> ServedModel:
    """Return the properties that decide which engines can serve ``model`` once it is
    converted to ``kv_heads`` key/value heads; without ``kv_heads``, as it is.
    """
    size = model.geometry
    return ServedModel(
        "own" if needs_custom_code(model) else "fold",
        size.layers,
        size.heads,
        kv_heads or size.kv_heads,
        size.head_dim,
        family=model.family.model_type,
        wrapper=model.tower is not None,
        # A fold is written with the older keys that its source lacks.
        older_rope=_has_older_rope({**model.config, **make_older_rope_keys(model.config)}),
    )


def describe_mla_model(model: Model, spec: MlaSpec) -> ServedModel:
    """Return the properties that decide which engines can serve ``model`` once it is converted to
    MLA with the sizes ``spec``.
    """
    size = model.geometry
    nope, value = spec.choose_head_dims(size.head_dim)
    return ServedModel(
        "own" if spec.layout == "kvfold" else spec.layout,
        size.layers,
        size.heads,
        kv_rank=spec.kv_rank,
        rope_dim=spec.rope_dim,
        divisors=count_cached_divisors(model, spec),
        heads=(nope, spec.rope_dim, value),
        wrapper=model.tower is not None,
        vocabulary=size.vocabulary,
        experts=model.block.sparse,
        scaled_rope=spec.layout == "engine"
        and read_rope_parameters(model.values)["rope_type"] != "default",
    )


def describe_mla_config(config: Mapping[str, Any]) -> ServedModel:
    """Return the properties that decide which engines can serve an existing MLA model, or a
    multimodal wrapper around one, from its ``config.json``.
    """
    model_type = config["model_type"]
    if model_type in WRAPPERS:
        return replace(describe_mla_config(config["text_config"]), wrapper=True)
    rope = config["qk_rope_head_dim"]
    experts = model_type == EXPERT_TYPE
    free = model_type == "youtu" or (experts and config.get("attention_bias"))
    return ServedModel(
        "free" if free else "engine",
        config["num_hidden_layers"],
        config["num_attention_heads"],
        kv_rank=config["kv_lora_rank"],
        rope_dim=rope,
        heads=(config["qk_nope_head_dim"], rope, config["v_head_dim"]),
        vocabulary=config.get("vocab_size", 0),
        older_rope=experts or _has_older_rope(config),
        experts=experts,
        scaled_rope=(config.get("rope_parameters") or {}).get("factor", 1.0) != 1.0,
    )


def _has_older_rope(config: Mapping[str, Any]) -> bool:
    """True if engines that only know the key ``rope_theta``, not ``rope_parameters``, can read the
    rotary embedding from ``config``.
    """
    return config.get("rope_theta") is not None or not config.get("rope_parameters")


def propose_mla_sizes_with_kernels(
    model: Model, layouts: Sequence[Layout] = ("engine", "free")
) -> list[MlaSpec]:
    """Return the MLA sizes for ``model`` that the MLA kernels of engines support, in each of
    ``layouts``, without those that the model cannot have.
    """
    specs = [MlaSpec(*split, layout=layout) for layout in layouts for split in _KERNEL_SPLITS]
    return [spec for spec in specs if not list_mla_problems(model, spec)]


def propose_mla_sizes_by_saving(model: Model, layout: Layout | None = None) -> list[MlaSpec]:
    """Return MLA sizes for ``model`` whose caches are about a half, a third, a quarter and an
    eighth of its present one. Sizes with MLA kernels are left out
    (`propose_mla_sizes_with_kernels`).

    Each is a spec in ``layout``, by default that of a conversion, with one of the splits that
    ``--budget`` chooses from; those that the layout cannot express are left out.
    """
    layout = layout or choose_mla_layout(model)
    rope = 2 if model.geometry.rotary_dims else 0
    present = count_cache_elements(model.geometry)
    budgets = [present // divisor for divisor in _CACHE_DIVISORS]
    other = rope + count_cached_divisors(model, MlaSpec(present, rope, layout=layout))
    specs = [
        MlaSpec(budget - other, rope, layout=layout)
        for budget in budgets
        if budget not in KERNEL_CACHES
    ]
    return [spec for spec in specs if not list_mla_problems(model, spec)]
