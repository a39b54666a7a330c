"""The engines that can serve a converted model, and its cache size in them. Does not import torch.

This file contains all facts about engines. Each row of ``ENGINES``, at the end, lists the source
files that were read and the kinds of results that were run, and names the function that judges a
result. ``tests/engines`` runs the engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.mla.spec import (
    EXPERT_TYPE,
    KERNEL_CACHES,
    KERNEL_HEADS,
    MlaSpec,
    cached_divisors,
)
from kvfold.convert.targets.own_code import needs_own_code
from kvfold.convert.targets.same_family import cache_elements

PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels support
_PARTS = (2, 3, 4, 8)  # divisors of the source's cache
RANKS = (1, 2, 4, 8)  # of tensor parallelism
_NOT_IN_SGLANG = ("nemotron", "smollm3")  # families whose class no EntryClass of srt/models names
_PLUGGED = ("gpt2", "gpt_neox", "opt")  # whose folds kvfold's plug-in registers in vLLM


@dataclass(frozen=True)
class ServedModel:
    """The properties of a converted model that matter to engines.

    ``kind``: ``fold`` is GQA or MQA in the source's class, ``free`` and ``engine`` are the MLA
    layouts, and ``own`` includes its modeling code. A fold has ``kv_heads`` of ``head_dim`` dims.
    MLA has a ``split`` (R, P), ``divisors`` that are cached too, and stored ``heads`` with
    (unrotated, rotary, value) dims. ``family`` is the ``model_type`` of a fold, or of the wrapper
    around a latent model. ``older_rope``: engines that do not read ``rope_parameters`` still use
    the right ``rope_theta``. ``experts``: the result is a latent model with experts (Mistral4).
    """

    kind: Literal["fold", "free", "engine", "own"]
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    split: tuple[int, int] = (0, 0)
    divisors: int = 0
    heads: tuple[int, int, int] = (0, 0, 0)
    q_rank: int | None = None
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
        """`cache_elements` by number of ranks, for each number in ``RANKS`` that the heads can be
        divided among.
        """
        possible = [ranks for ranks in RANKS if self.query_heads % ranks == 0]
        # Fewer key/value heads than ranks are repeated, as long as each rank gets a whole number.
        whole = [
            ranks for ranks in possible if self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        ]
        return {str(ranks): self.cache_elements(ranks) for ranks in whole}


def describe_fold(model: Model, kv_heads: int | None = None) -> ServedModel:
    """The result of folding ``model`` to ``kv_heads`` key/value heads; by default ``model`` itself."""
    size = model.geometry
    family = model.family.model_type
    present = size.kv_heads if kv_heads is None else kv_heads
    if model.family.sizes.kv_heads is None:
        return ServedModel("own", size.layers, size.heads, present, size.head_dim, family=family)
    # A fold is written with the older keys that its source lacks.
    older = _older_rope(family, {**model.config, **older_rope_keys(model.config)})
    return ServedModel(
        "fold", size.layers, size.heads, present, size.head_dim, family=family, older_rope=older
    )


def _older_rope(family: str, config: Mapping[str, Any]) -> bool:
    """True if engines that ignore ``rope_parameters`` still rotate as transformers does."""
    table = config.get("rope_parameters")
    assumed = family in ("llama", "mistral", "deepseek_v3") and table == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
    return not table or "rope_theta" in config or assumed


def describe_mla(model: Model, target: MlaSpec) -> ServedModel:
    """The result of converting ``model`` to ``target``."""
    size, (nope, value) = model.geometry, target.head_dims(model.geometry.head_dim)
    return ServedModel(
        "own" if target.layout == "kvfold" else target.layout,
        size.layers,
        size.heads,
        split=(target.kv_rank, target.rope_dim),
        divisors=cached_divisors(model, target),
        heads=(nope, target.rope_dim, value),
        q_rank=target.q_rank,
        family="" if model.tower is None else model.family.model_type,
        vocabulary=size.vocabulary,
        experts=model.block.sparse,
    )


def describe_latent_config(config: Mapping[str, Any]) -> ServedModel:
    """The result described by the ``config.json`` of a latent model or of a wrapper around a latent
    model.
    """
    if (wrapper := config["model_type"]) in WRAPPERS:
        return replace(describe_latent_config(config["text_config"]), family=wrapper)
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    experts = config["model_type"] == EXPERT_TYPE
    free = config["model_type"] == "youtu" or (experts and config.get("attention_bias"))
    return ServedModel(
        "free" if free else "engine",
        config["num_hidden_layers"],
        config["num_attention_heads"],
        split=(config["kv_lora_rank"], rope),
        heads=(nope, rope, value),
        q_rank=config.get("q_lora_rank"),
        vocabulary=config.get("vocab_size", 0),
        older_rope=experts or _older_rope(config["model_type"], config),
        experts=experts,
    )


@dataclass(frozen=True)
class Way:
    """An engine's answer for a result: notes on serving it, or the reason why the engine cannot.

    ``read``: the answer was read in the engine's sources and not confirmed by a run.
    """

    serves: bool
    how: str = ""
    read: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine with its version, the function that judges results, and the kinds of results that
    were run.

    ``ask`` returns the answer for a result. A run compared greedy tokens with those from
    transformers in float32. ``ran`` lists the kinds that were run (folds only with llama, so for
    other families they count as not run), ``ran_experts`` those run for a model with experts.
    """

    name: str
    version: str
    ask: Callable[[ServedModel], Way]
    ran: tuple[str, ...] = ()
    ran_experts: tuple[str, ...] = ()

    def way(self, result: ServedModel) -> Way:
        """The answer for ``result``. Only transformers was tested with everything that kvfold
        writes.
        """
        if self.ask is not _transformers:
            plugged = self.ask is _vllm and result.family in _PLUGGED and not any(result.split)
            if result.kind == "own" and not plugged:
                return Way(False, "not tested with modeling code from a checkpoint")
            if result.family in WRAPPERS:
                return Way(False, "not tested with multimodal wrappers")
        return self.ask(result)


@dataclass(frozen=True)
class Support:
    """An engine's answer for a result, as reported to users.

    ``cache``: elements per token per layer on one device. ``how``: notes on serving the result, or
    the reason why the engine cannot; ``instead``: options of ``kvfold convert`` for a result that
    it can serve. ``ran``: confirmed by a run with this version.
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    instead: str | None
    ran: bool

    def to_text(self) -> str:
        """The verdict in one line, for the summary and the model card."""
        if not self.serves:
            return f"{self.engine}: no, {self.how}" + (
                f"; instead: {self.instead}" if self.instead else ""
            )
        notes = [
            *([] if self.ran else ["according to its source code, not tested"]),
            *([self.how] if self.how else []),
        ]
        return ", ".join([f"{self.engine}: yes", *notes])


def support_for(
    result: ServedModel, alternatives: Mapping[str, ServedModel] | None = None
) -> list[Support]:
    """Every engine's answer for ``result``; ``alternatives`` are other results by their options,
    the best first.
    """
    made = []
    for engine in ENGINES:
        way = engine.way(result)
        runs = engine.ran_experts if result.experts else engine.ran
        # A result with a larger cache is not what was asked for.
        smaller = {
            options: other
            for options, other in (alternatives or {}).items()
            if other.cache_elements() <= result.cache_elements()
        }
        others = (options for options, other in smaller.items() if engine.way(other).serves)
        cache, instead = (
            (result.cache_elements(), None) if way.serves else (None, next(others, None))
        )
        ran = (
            result.kind in runs
            and (result.kind == "own" or result.family in ("", "llama"))
            and not way.read
        )
        made.append(Support(engine.name, engine.version, way.serves, cache, way.how, instead, ran))
    return made


def format_support(answers: Sequence[Support]) -> str:
    """One line with the engines that serve a result, those that do not, and an asterisk for what
    was not run.
    """
    served = [each.engine + "*" * (not each.ran) for each in answers if each.serves]
    others = [each.engine for each in answers if not each.serves]
    note = (
        " (*: according to its source code, not run)"
        if any(name.endswith("*") for name in served)
        else ""
    )
    return f"served by {', '.join(served)}{note}" + (
        f"; not by {', '.join(others)}" if others else ""
    )


def propose_alternatives(model: Model, target: MlaSpec | None = None) -> dict[str, ServedModel]:
    """Other results for ``model``, by their options: ``target`` in layout ``engine``, `propose_kernel_splits`,
    and MQA.
    """
    same = [] if target is None else [replace(target, layout="engine")]
    possible = [each for each in same if not latent_problems(model, each, allow_growth=True)]
    results = {
        format_mla_options(each): describe_mla(model, each)
        for each in [*possible, *propose_kernel_splits(model)]
    }
    fold = {"--to mqa": describe_fold(model, 1)} if model.geometry.kv_heads > 1 else {}
    return results | fold


def propose_kernel_splits(
    model: Model, layouts: Sequence[Literal["free", "engine", "kvfold"]] = ("engine", "free")
) -> list[MlaSpec]:
    """The targets for ``model`` with splits that MLA kernels support, in each of ``layouts``."""
    targets = [MlaSpec(*split, layout=layout) for layout in layouts for split in PROPOSED]
    return [target for target in targets if not latent_problems(model, target)]


def propose_budgets(
    model: Model, layout: Literal["free", "engine", "kvfold"] | None = None
) -> list[MlaSpec]:
    """MLA caches of about a half, a third, a quarter and an eighth of the model's, except those of
    `propose_kernel_splits`.

    Each is a target in ``layout``, by default that of a conversion, with one of the splits that
    ``--budget`` chooses from; those that the layout cannot express are left out.
    """
    stored = layout or ("kvfold" if needs_own_code(model) else "free")
    rope = 2 if model.geometry.rotary_dims else 0
    sizes = (cache_elements(model.geometry) // part for part in _PARTS)
    targets = [
        MlaSpec(size - rope, rope, layout=stored) for size in sizes if size not in KERNEL_CACHES
    ]
    return [target for target in targets if not latent_problems(model, target)]


def format_mla_options(target: MlaSpec) -> str:
    """The options of ``kvfold convert`` that produce ``target``."""
    options = (
        f"--to mla --kv-rank {target.kv_rank} --rope-dim {target.rope_dim} --layout {target.layout}"
    )
    return options if target.q_rank is None else f"{options} --q-rank {target.q_rank}"


def _transformers(result: ServedModel) -> Way:
    if result.kind == "own":
        return Way(
            True,
            "with trust_remote_code=True, or without it after kvfold.attention.register_models()",
        )
    absorb = "kvfold.attention.absorb(model) decodes over the latent cache"
    if result.experts:
        return Way(True, f"version 5.17 or later, as Mistral4ForCausalLM; {absorb}")
    return Way(
        True, {"fold": "", "free": f"version 5.17 or later; {absorb}"}.get(result.kind, absorb)
    )


def _vllm(result: ServedModel) -> Way:
    if result.kind == "own":
        return Way(True, "if kvfold is installed in its environment")
    if result.kind == "fold":
        return Way(True)
    sizes = f"{', '.join(map(str, KERNEL_CACHES[:-1]))} or {KERNEL_CACHES[-1]}"
    if result.cache_elements() not in KERNEL_CACHES:
        return Way(
            False,
            f"its MLA kernels support {sizes} cached elements, but this model has"
            f" {result.cache_elements()}",
        )
    if result.experts and result.kind == "free":
        return Way(
            False, "it divides by the width of the shared expert, which is 0 here (SIGFPE on CPUs)"
        )
    # Its own classes read DeepSeek models only; others run through transformers' code, with MLA
    # kernels.
    backend = (
        "through its Transformers backend, " if result.experts or result.kind == "free" else ""
    )
    # The kernel for CPUs takes this one cache size, with heads of any size; those for GPUs are
    # picky about heads.
    on_cpu = result.split == (512, 64)
    if result.heads in KERNEL_HEADS:
        where = (
            "on CPUs with AMX, float32 needs --attention-backend CPU_MLA"
            if on_cpu
            else "on GPUs only"
        )
        return Way(True, f"{backend}{where}", read=not on_cpu)
    *known, present = (
        f"{nope}+{rope}/{value}" for nope, rope, value in (*KERNEL_HEADS, result.heads)
    )
    heads = (
        f"on GPUs its MLA prefill supports head dims {', '.join(known)}, but this model has"
        f" {present}"
    )
    if on_cpu:
        return Way(True, f"{backend}on CPUs only: {heads}")
    return Way(False, heads)


def _sglang(result: ServedModel) -> Way:
    missing = result.family if result.family in _NOT_IN_SGLANG else ""
    if result.experts or result.kind == "free":
        missing = "Mistral4" if result.experts else "Youtu"
    if missing:
        return Way(
            False,
            f"it has no {missing} model class, and its fallback to transformers code was not"
            " tested",
        )
    if result.family in ("phi", "olmo") and result.kv_heads != result.query_heads:
        return Way(
            False,
            f"it assumes that {result.family} models have as many key/value heads as query heads",
        )
    return Way(
        True, "" if result.kind == "fold" else "the sizes that its kernels support are not known"
    )


def _llama_cpp(result: ServedModel) -> Way:
    if result.kind == "fold" and result.family == "phi" and result.kv_heads != result.query_heads:
        return Way(
            False,
            "its converter assumes that Phi models have as many key/value heads as query heads",
        )
    if result.kind == "fold":
        return Way(True, "if its converter supports the tokenizer")
    if result.kind == "free":
        converter = (
            "its converter lacks Mistral4ForCausalLM, and ggml fails on a shared expert of width 0"
        )
        return Way(
            False,
            (
                converter
                if result.experts
                else "it rejects attention biases (wrong number of tensors)"
            ),
        )
    # It takes models of these sizes for a DeepSeek-V2-Lite, whose queries have no latent.
    lite = result.layers in (26, 27) or (result.layers, result.vocabulary) == (48, 128256)
    if lite and result.q_rank is not None:
        return Way(
            False, f"it assumes that models with {result.layers} layers have no query latent"
        )
    # Its converter looks these keys up without a default, or knows the class by another name.
    edits = [] if result.q_rank is not None or lite else ['"q_lora_rank": 0']
    edits += ['"architectures": ["Mistral3ForConditionalGeneration"]'] if result.experts else []
    edit = (
        f"with {' and '.join(edits)} in the config.json that its converter reads" if edits else ""
    )
    return Way(True, ", ".join(filter(None, [edit, "BPE tokenizers only"])))


def _mlx_lm(result: ServedModel) -> Way:
    if result.kind == "free" and result.experts:
        return Way(False, "it needs a shared expert with a width above 0")
    if result.kind == "free":
        return Way(False, "Model type youtu not supported")
    if result.family == "olmo":
        return Way(False, "it supports only the older OLMo checkpoints (hf_olmo)")
    if not result.older_rope:
        return Way(
            False, 'it ignores "rope_parameters", the only place of "rope_theta" in config.json'
        )
    return Way(True)


ENGINES = (
    # models/youtu/modeling_youtu.py, models/deepseek_v3/modeling_deepseek_v3.py,
    # models/mistral4/modeling_mistral4.py
    Engine(
        "transformers",
        "5.23.0",
        _transformers,
        ("fold", "free", "engine", "own"),
        ("free", "engine"),
    ),
    # model_executor/layers/attention/mla_attention.py (sizes of the cache),
    # v1/attention/backends/mla/prefill/flash_attn.py (sizes of heads),
    # v1/attention/backends/mla/cpu_mla.py and amx_mla.py (512+64 only),
    # model_executor/models/transformers/base.py (layout free), moe.py and fusers/moe.py in that
    # folder (experts), fusers/attention.py there (layout kvfold)
    Engine("vLLM", "0.32.0", _vllm, ("fold", "free", "engine", "own"), ("free", "engine")),
    # srt/models/deepseek_v2.py (config keys), EntryClass of srt/models/*.py (classes of folds),
    # srt/models/phi.py and olmo.py (key/value heads), srt/model_loader/utils.py (the way to
    # transformers' code)
    Engine(
        "SGLang",
        "0.5.23",
        _sglang,
    ),
    # conversion/deepseek.py, conversion/phi.py (key/value heads), src/models/deepseek2.cpp (query
    # rank), src/llama-model.cpp (number of tensors), conversion/mistral3.py and
    # src/models/mistral4.cpp (experts)
    Engine("llama.cpp", "b11739", _llama_cpp, ("fold", "free", "engine"), ("free", "engine")),
    # utils.py (model types), models/deepseek_v3.py, models/llama.py (rope_theta), models/olmo.py
    # (config keys), models/mistral4.py (shared experts)
    Engine(
        "mlx-lm",
        "0.32.2",
        _mlx_lm,
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
)
