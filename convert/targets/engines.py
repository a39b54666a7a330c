"""The engines that can serve a converted model, as a table. Does not import torch.

``engines.toml`` beside this file has every fact about engines. `tests/engines` runs them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.mla.spec import (
    EXPERT_TYPE,
    KERNEL_CACHES,
    KERNEL_HEADS,
    Layout,
    MlaSpec,
    cached_divisors,
)
from kvfold.convert.targets.own_code import needs_own_code
from kvfold.convert.targets.same_family import cache_elements

PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels support
_CACHE_DIVISORS = (2, 3, 4, 8)  # proposed caches, as parts of the source's
RANKS = (1, 2, 4, 8)  # of tensor parallelism
_PLUGGED = ("gpt2", "gpt_neox", "opt")  # whose folds kvfold's plug-in registers in vLLM


@dataclass(frozen=True)
class ServedModel:
    """The properties of a converted model that matter to engines.

    kind: `fold` is GQA or MQA in the source's class, `free` and `engine` are the MLA layouts, and
        `own` includes its modeling code
    layers: number of layers
    query_heads: number of query heads
    kv_heads: key/value heads of a fold
    head_dim: dims of a fold's heads
    split: (R, P) of MLA
    divisors: divisors of key norms that are cached next to R + P
    heads: (unrotated, rotary, value) dims of stored MLA heads
    family: `model_type` of a fold, or of the wrapper around a latent model
    older_rope: engines that do not read `rope_parameters` still use the right `rope_theta`
    vocabulary: size of the vocabulary
    experts: a latent model with experts (Mistral4)
    """

    kind: Literal["fold", "free", "engine", "own"]
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    split: tuple[int, int] = (0, 0)
    divisors: int = 0
    heads: tuple[int, int, int] = (0, 0, 0)
    family: str = ""
    older_rope: bool = True
    vocabulary: int = 0
    experts: bool = False

    def cache_elements(self, ranks: int = 1) -> int:
        """KV-cache elements per token per layer on each of ``ranks`` tensor-parallel ranks.

        Key/value heads are divided among the ranks, with at least one per rank; every rank caches
        the whole latent.
        """
        return sum(self.split) + self.divisors or 2 * -(-self.kv_heads // ranks) * self.head_dim

    def per_rank(self) -> dict[str, int]:
        """`cache_elements` by number of ranks, for each of ``RANKS`` that divides the heads."""
        return {
            str(ranks): self.cache_elements(ranks)
            for ranks in RANKS
            if self.query_heads % ranks == 0
            # Fewer key/value heads than ranks are repeated, if each rank gets a whole number.
            and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0)
        }

    def conditions(self) -> set[str]:
        """The conditions of ``engines.toml`` that this model meets."""
        conditions = {
            self.kind: True,
            self.family: True,
            "experts": self.experts,
            "deepseek": self.kind == "engine" and not self.experts,
            "wrapper": self.family in WRAPPERS,
            "plugged": self.family in _PLUGGED and not any(self.split),
            "grouped": self.kind == "fold" and self.kv_heads != self.query_heads,
            "kernel cache": self.cache_elements() in KERNEL_CACHES,
            "kernel heads": self.heads in KERNEL_HEADS,
            "512+64": self.split == (512, 64),
            # llama.cpp takes models of these sizes for a DeepSeek-V2-Lite.
            "lite": self.layers in (26, 27) or (self.layers, self.vocabulary) == (48, 128256),
            "no rope_theta": not self.older_rope,
        }
        return {name for name, met in conditions.items() if met}


@cache
def load_engines() -> dict[str, dict[str, Any]]:
    """The tables of ``engines.toml`` by the engine's name, with ``version`` and ``answers``."""
    return tomllib.loads(Path(__file__).with_name("engines.toml").read_text(encoding="utf-8"))


def find_answer(engine: str, model: ServedModel) -> tuple[str, str]:
    """What ``engine`` answers for ``model``: ``ran``, ``read`` or ``no``, and a sentence. The first
    row that applies counts.
    """
    met = model.conditions()

    def applies(when: str) -> bool:
        terms = filter(None, when.split(", "))
        return all((term.removeprefix("not ") in met) != term.startswith("not ") for term in terms)

    rows = load_engines()[engine]["answers"]
    return next((answer, sentence) for when, answer, sentence in rows if applies(when))


@dataclass(frozen=True)
class Support:
    """An engine's answer for a model, as reported to users.

    engine, version: the engine
    serves: whether it serves the model
    cache: KV-cache elements per token per layer on one device, None if it does not serve the model
    how: notes on serving the model, or the reason why the engine cannot
    instead: options of `kvfold convert` for a model that it can serve
    ran: confirmed by a run with this version
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    instead: str | None
    ran: bool

    def to_text(self) -> str:
        """The answer in one line, for the summary and the model card."""
        if not self.serves:
            instead = f"; instead: {self.instead}" if self.instead else ""
            return f"{self.engine}: no, {self.how}{instead}"
        notes = ["yes", "" if self.ran else "according to its source code, not tested", self.how]
        return f"{self.engine}: {', '.join(filter(None, notes))}"


def support_for(
    model: ServedModel, alternatives: Mapping[str, ServedModel] | None = None
) -> list[Support]:
    """Every engine's answer for ``model``; ``alternatives`` are other models by the options that
    produce them, the best first.
    """
    size = model.cache_elements()
    result = []
    for engine, table in load_engines().items():
        answer, how = find_answer(engine, model)
        serves = answer != "no"
        instead = None
        if not serves and alternatives is not None:
            # A model with a larger cache is not what was asked for.
            served = (
                options
                for options, other in alternatives.items()
                if other.cache_elements() <= size and find_answer(engine, other)[0] != "no"
            )
            instead = next(served, None)
        how = how.replace("{cache}", str(size))
        how = how.replace("{heads}", "{}+{}/{}".format(*model.heads))
        # Folds were run with llama alone.
        ran = answer == "ran" and (model.kind == "own" or model.family in ("", "llama"))
        cache = size if serves else None
        result.append(Support(engine, table["version"], serves, cache, how, instead, ran))
    return result


def describe_fold(model: Model, kv_heads: int | None = None) -> ServedModel:
    """``model`` folded to ``kv_heads`` key/value heads; by default ``model`` itself."""
    size = model.geometry
    family = model.family.model_type
    own = needs_own_code(model)
    # A fold is written with the older keys that its source lacks.
    older = own or _older_rope(family, {**model.config, **older_rope_keys(model.config)})
    return ServedModel(
        "own" if own else "fold",
        size.layers,
        size.heads,
        kv_heads or size.kv_heads,
        size.head_dim,
        family=family,
        older_rope=older,
    )


def describe_mla(model: Model, spec: MlaSpec) -> ServedModel:
    """``model`` converted to ``spec``."""
    size = model.geometry
    nope, value = spec.head_dims(size.head_dim)
    return ServedModel(
        "own" if spec.layout == "kvfold" else spec.layout,
        size.layers,
        size.heads,
        split=(spec.kv_rank, spec.rope_dim),
        divisors=cached_divisors(model, spec),
        heads=(nope, spec.rope_dim, value),
        family="" if model.tower is None else model.family.model_type,
        vocabulary=size.vocabulary,
        experts=model.block.sparse,
    )


def describe_latent_config(config: Mapping[str, Any]) -> ServedModel:
    """The model of a decoded ``config.json`` of a latent model, or of a wrapper around one."""
    model_type = config["model_type"]
    if model_type in WRAPPERS:
        return replace(describe_latent_config(config["text_config"]), family=model_type)
    rope = config["qk_rope_head_dim"]
    experts = model_type == EXPERT_TYPE
    free = model_type == "youtu" or (experts and config.get("attention_bias"))
    return ServedModel(
        "free" if free else "engine",
        config["num_hidden_layers"],
        config["num_attention_heads"],
        split=(config["kv_lora_rank"], rope),
        heads=(config["qk_nope_head_dim"], rope, config["v_head_dim"]),
        vocabulary=config.get("vocab_size", 0),
        older_rope=experts or _older_rope(model_type, config),
        experts=experts,
    )


def _older_rope(family: str, config: Mapping[str, Any]) -> bool:
    """Whether engines that ignore ``rope_parameters`` still rotate as transformers does."""
    table = config.get("rope_parameters")
    default = {"rope_type": "default", "rope_theta": 10000.0}
    assumed = family in ("llama", "mistral", "deepseek_v3") and table == default
    return not table or "rope_theta" in config or assumed


def propose_alternatives(model: Model, spec: MlaSpec | None = None) -> dict[str, ServedModel]:
    """Other conversions of ``model``, by their options: ``spec`` in layout ``engine``,
    `propose_kernel_splits`, and MQA.
    """
    specs = propose_kernel_splits(model)
    if spec is not None:
        same = replace(spec, layout="engine")
        if not latent_problems(model, same, allow_growth=True):
            specs = [same, *specs]
    served = {format_mla_options(spec): describe_mla(model, spec) for spec in specs}
    if model.geometry.kv_heads > 1:
        served["--to mqa"] = describe_fold(model, 1)
    return served


def propose_kernel_splits(
    model: Model, layouts: Sequence[Layout] = ("engine", "free")
) -> list[MlaSpec]:
    """The specs for ``model`` with splits that MLA kernels support, in each of ``layouts``."""
    specs = [MlaSpec(*split, layout=layout) for layout in layouts for split in PROPOSED]
    return [spec for spec in specs if not latent_problems(model, spec)]


def propose_budgets(model: Model, layout: Layout | None = None) -> list[MlaSpec]:
    """MLA caches of about a half, a third, a quarter and an eighth of the model's, except those of
    `propose_kernel_splits`.

    Each is a spec in ``layout``, by default that of a conversion, with one of the splits that
    ``--budget`` chooses from; those that the layout cannot express are left out.
    """
    layout = layout or ("kvfold" if needs_own_code(model) else "free")
    rope = 2 if model.geometry.rotary_dims else 0
    budgets = [cache_elements(model.geometry) // divisor for divisor in _CACHE_DIVISORS]
    specs = [
        MlaSpec(budget - rope, rope, layout=layout)
        for budget in budgets
        if budget not in KERNEL_CACHES
    ]
    return [spec for spec in specs if not latent_problems(model, spec)]


def format_mla_options(spec: MlaSpec) -> str:
    """The options of ``kvfold convert`` that produce ``spec``."""
    return f"--to mla --kv-rank {spec.kv_rank} --rope-dim {spec.rope_dim} --layout {spec.layout}"
