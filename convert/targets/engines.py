"""The engines that serve a converted model, and at which cache size; without torch.

This file holds all facts about engines. A `Result` has the properties of a model that engines look at. A row of
``ENGINES``, at the end, says where the facts of an engine were read and what was run, and names the function that
answers for a result. ``tests/engines`` runs the engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.targets.mla.config import (
    EXPERT_TYPE,
    KERNEL_CACHES,
    KERNEL_HEADS,
    LatentTarget,
    cached_divisors,
)
from kvfold.convert.targets.mla.problems import latent_problems

PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels take
RANKS = (1, 2, 4, 8)  # of tensor parallelism
_NOT_IN_SGLANG = ("nemotron", "smollm3")  # families whose class no EntryClass of srt/models names


@dataclass(frozen=True)
class Result:
    """The properties of a converted model that engines look at.

    ``kind``: ``fold`` is GQA or MQA in the source's class; ``free`` and ``engine`` are the MLA layouts; ``own`` brings
    its modeling code along. A fold has ``kv_heads`` of ``head_dim`` dims; MLA has a ``split`` R, P, ``divisors`` cached
    with them, and stored ``heads`` of (unrotated, rotary, value) dims. ``family``: the ``model_type`` of a fold, or of
    the wrapper around a latent model. ``older_rope``: the config has ``rope_theta`` outside ``rope_parameters`` too, as
    before transformers 5, or does not need it. ``yarn``: plain RoPE is written as YaRN of factor 1. ``experts``: a
    latent model with experts, a Mistral4. ``kept``: weights outside the attention are FP8 or MXFP4.
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
    yarn: bool = True
    experts: bool = False
    kept: bool = False

    def elements(self, ranks: int = 1) -> int:
        """KV-cache elements per token per layer on each of ``ranks`` tensor-parallel ranks.

        Key/value heads are shared out, one at least to each rank; a latent is whole on every rank.
        """
        return sum(self.split) + self.divisors or 2 * -(-self.kv_heads // ranks) * self.head_dim

    def per_rank(self) -> dict[str, int]:
        """``elements`` for every number of ranks in ``RANKS`` to which the heads can be shared out."""
        sizes = {}
        for ranks in RANKS:
            # Fewer key/value heads than ranks are repeated, as long as each rank gets a whole number.
            whole = self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
            if self.query_heads % ranks == 0 and whole:
                sizes[str(ranks)] = self.elements(ranks)
        return sizes


def folded_result(model: Model, kv_heads: int | None = None) -> Result:
    """The result of folding ``model`` to ``kv_heads`` key/value heads; by default of ``model`` itself."""
    size, family = model.geometry, model.family.model_type
    present = size.kv_heads if kv_heads is None else kv_heads
    if model.family.sizes.kv_heads is None:
        return Result("own", size.layers, size.heads, present, size.head_dim)
    # A fold is written with the older keys that its source lacks.
    older = _older_rope(family, {**model.config, **older_rope_keys(model.config)})
    return Result("fold", size.layers, size.heads, present, size.head_dim, family=family, older_rope=older)


def _older_rope(family: str, config: Mapping[str, Any]) -> bool:
    """True if readers that look for ``rope_theta`` outside ``rope_parameters`` rotate as transformers does."""
    table = config.get("rope_parameters")
    assumed = family in ("llama", "mistral", "deepseek_v3") and table == {"rope_type": "default", "rope_theta": 10000.0}
    return not table or "rope_theta" in config or assumed


def latent_result_of(model: Model, target: LatentTarget) -> Result:
    """The result of converting ``model`` to ``target``."""
    size, (nope, value) = model.geometry, target.head_dims(model.geometry.head_dim)
    return Result(
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


def latent_result(config: Mapping[str, Any]) -> Result:
    """The result that the ``config.json`` of a latent model, or of a wrapper around one, describes."""
    if (wrapper := config["model_type"]) in WRAPPERS:
        return replace(latent_result(config["text_config"]), family=wrapper)
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    experts = config["model_type"] == EXPERT_TYPE
    free = config["model_type"] == "youtu" or (experts and config.get("attention_bias"))
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Result(
        "free" if free else "engine",
        config["num_hidden_layers"],
        config["num_attention_heads"],
        split=(config["kv_lora_rank"], rope),
        heads=(nope, rope, value),
        q_rank=config.get("q_lora_rank"),
        vocabulary=config.get("vocab_size", 0),
        older_rope=experts or _older_rope(config["model_type"], config),
        yarn=table.get("rope_type") == "yarn",
        experts=experts,
    )


@dataclass(frozen=True)
class Way:
    """One engine's way to serve a result, or the reason why it cannot; ``read``: from its sources, without a run."""

    serves: bool
    how: str = ""
    read: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine: the version that the facts come from, and the kinds of results that were run there.

    ``ask`` answers for a result. A run compared greedy tokens with those of transformers in float32. Folds were run for
    a llama (those of other families count as read); ``ran_experts``: the kinds run for a model with experts. All others
    were read only. ``kept`` is the answer in place of a yes where weights outside the attention are quantized.
    """

    name: str
    version: str
    ask: Callable[[Result], Way]
    ran: tuple[str, ...] = ()
    ran_experts: tuple[str, ...] = ()
    kept: Way | None = None

    def way(self, result: Result) -> Way:
        """The answer for ``result``; no engine but transformers was tested with everything that kvfold writes."""
        if self.ask is not _transformers:
            if result.kind == "own":
                return Way(False, "whether it runs the modeling code that the result brings was neither run nor read")
            if result.family in WRAPPERS:
                return Way(False, "how it serves multimodal wrappers was neither run nor read")
        answer = self.ask(result)
        return self.kept if self.kept and result.kept and answer.serves else answer


@dataclass(frozen=True)
class Verdict:
    """An engine's answer for a result.

    ``cache``: elements per token per layer on one device. ``how``: the way it serves the result, or the reason why not;
    ``instead``: options of ``kvfold convert`` whose result it serves. ``ran``: seen in a run of that version.
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    instead: str | None
    ran: bool

    def to_text(self) -> str:
        """One line for the summary and the card."""
        if not self.serves:
            return f"{self.engine}: no, {self.how}" + (f"; instead: {self.instead}" if self.instead else "")
        notes = [*([] if self.ran else ["by its sources, not run"]), *([self.how] if self.how else [])]
        return ", ".join([f"{self.engine}: yes", *notes])


def verdicts(result: Result, alternatives: Mapping[str, Result] | None = None) -> list[Verdict]:
    """Every engine's answer. ``alternatives``: other results of the same source by their options, the best first."""
    made = []
    for engine in ENGINES:
        way, runs = engine.way(result), engine.ran_experts if result.experts else engine.ran
        others = (options for options, other in (alternatives or {}).items() if engine.way(other).serves)
        cache, instead = (result.elements(), None) if way.serves else (None, next(others, None))
        ran = result.kind in runs and result.family in ("", "llama") and not way.read
        made.append(Verdict(engine.name, engine.version, way.serves, cache, way.how, instead, ran))
    return made


def alternatives(model: Model, target: LatentTarget | None = None) -> dict[str, Result]:
    """Other results of ``model`` by their options: ``target`` in layout ``engine``, `proposals`, a fold."""
    same = [] if target is None else [replace(target, layout="engine")]
    possible = [each for each in same if not latent_problems(model, each, allow_growth=True)]
    results = {latent_options(each): latent_result_of(model, each) for each in [*possible, *proposals(model)]}
    fold = {"--to mqa": folded_result(model, 1)} if model.geometry.kv_heads > 1 else {}
    return results | fold


def proposals(model: Model) -> list[LatentTarget]:
    """The targets of ``model`` that MLA kernels support, layout ``engine`` before ``free``."""
    targets = [LatentTarget(*split, layout=layout) for layout in ("engine", "free") for split in PROPOSED]
    return [target for target in targets if not latent_problems(model, target)]


def latent_options(target: LatentTarget) -> str:
    """The options of ``kvfold convert`` that make ``target``."""
    options = f"--to mla --kv-rank {target.kv_rank} --rope-dim {target.rope_dim} --layout {target.layout}"
    return options if target.q_rank is None else f"{options} --q-rank {target.q_rank}"


def _transformers(result: Result) -> Way:
    if result.kind == "own":
        return Way(True, "with trust_remote_code=True, or without it after kvfold.attention.register_models()")
    absorb = "kvfold.attention.absorb(model) decodes over the latent cache"
    if result.experts:
        return Way(True, f"from 5.4 on, loaded by Mistral4ForCausalLM; {absorb}")
    return Way(True, {"fold": "", "free": f"from 5.1 on; {absorb}"}.get(result.kind, absorb))


def _vllm(result: Result) -> Way:
    if result.kind == "fold":
        return Way(True)
    sizes = f"{', '.join(map(str, KERNEL_CACHES[:-1]))} or {KERNEL_CACHES[-1]}"
    if result.elements() not in KERNEL_CACHES:
        return Way(False, f"its MLA kernels take {sizes} cached elements, found {result.elements()}")
    if result.kind == "engine" and not result.yarn:
        return Way(False, "on CPUs it rotates the queries of DeepSeek models with plain RoPE wrongly: convert again")
    if result.experts and result.kind == "free":
        return Way(False, "it divides by the width of the shared expert, which is 0 (SIGFPE on a CPU)")
    # Its own classes read DeepSeek models only; others run through transformers' code, with MLA kernels.
    backend = "by its Transformers backend, " if result.experts or result.kind == "free" else ""
    # The kernel for CPUs takes this one cache size, with heads of any size; those for GPUs are picky about heads.
    on_cpu = result.split == (512, 64)
    if result.heads in KERNEL_HEADS:
        where = "on CPUs with AMX float32 needs --attention-backend CPU_MLA" if on_cpu else "on GPUs only"
        return Way(True, f"{backend}{where}", read=not on_cpu)
    *known, found = (f"{nope}+{rope} and {value}" for nope, rope, value in (*KERNEL_HEADS, result.heads))
    heads = f"on GPUs its MLA prefill takes heads of {', '.join(known)} dims, found {found}"
    if on_cpu:
        return Way(True, f"{backend}on CPUs only: {heads}")
    return Way(False, heads)


def _sglang(result: Result) -> Way:
    missing = result.family if result.family in _NOT_IN_SGLANG else ""
    if result.experts or result.kind == "free":
        missing = "Mistral4" if result.experts else "Youtu"
    if missing:
        return Way(False, f"it has no {missing} model; whether it runs transformers' code of one is not known")
    if result.family in ("phi", "olmo") and result.kv_heads != result.query_heads:
        return Way(False, f"it gives {result.family} models as many key/value heads as query heads")
    return Way(True, "" if result.kind == "fold" else "its kernels' sizes are not known")


def _llama_cpp(result: Result) -> Way:
    if result.kind == "fold" and result.family == "phi" and result.kv_heads != result.query_heads:
        return Way(False, "its converter gives Phi models as many key/value heads as query heads")
    if result.kind == "fold":
        return Way(True, "where its converter knows the tokenizer")
    if result.kind == "free":
        converter = "its converter knows no Mistral4ForCausalLM, and ggml asserts on a shared expert of width 0"
        return Way(False, converter if result.experts else "it refuses attention biases (wrong number of tensors)")
    # It takes models of these sizes for a DeepSeek-V2-Lite, whose queries have no latent.
    lite = result.layers in (26, 27) or (result.layers, result.vocabulary) == (48, 128256)
    if lite and result.q_rank is not None:
        return Way(False, f"in models of {result.layers} layers it takes queries for ones without a latent")
    # Its converter looks these keys up without a default, or knows the class by another name.
    edits = [] if result.q_rank is not None or lite else ['"q_lora_rank": 0']
    edits += ['"architectures": ["Mistral3ForConditionalGeneration"]'] if result.experts else []
    edit = f"with {' and '.join(edits)} in the copy of config.json that is converted" if edits else ""
    return Way(True, ", ".join(filter(None, [edit, "BPE tokenizers only"])))


def _mlx_lm(result: Result) -> Way:
    if result.kind == "free":
        refusal = "it needs a shared expert of some width" if result.experts else "Model type youtu not supported"
        return Way(False, refusal)
    if result.family == "olmo":
        return Way(False, "it reads the older checkpoints of OLMo only, those of hf_olmo")
    if not result.older_rope:
        return Way(False, 'it ignores "rope_parameters" in config.json, and "rope_theta" is nowhere else')
    return Way(True)


ENGINES = (
    # models/youtu/modeling_youtu.py, models/deepseek_v3/modeling_deepseek_v3.py, models/mistral4/modeling_mistral4.py
    Engine("transformers", "5.23.0", _transformers, ("fold", "free", "engine", "own"), ("free", "engine")),
    # model_executor/layers/attention/mla_attention.py (sizes of the cache),
    # v1/attention/backends/mla/prefill/flash_attn.py (sizes of heads),
    # v1/attention/backends/mla/cpu_mla.py and amx_mla.py (512+64 only),
    # model_executor/models/transformers/base.py (layout free), moe.py and fusers/moe.py in that folder (experts)
    Engine("vLLM", "0.32.0", _vllm, ("fold", "free", "engine"), ("free", "engine")),
    # srt/models/deepseek_v2.py (config keys), EntryClass of srt/models/*.py (classes of folds),
    # srt/models/phi.py and olmo.py (key/value heads), srt/model_loader/utils.py (the way to transformers' code)
    Engine(
        "SGLang",
        "0.5.23",
        _sglang,
        kept=Way(False, "whether it serves FP8 weights beside dense attention was neither run nor read"),
    ),
    # conversion/deepseek.py, conversion/phi.py (key/value heads), src/models/deepseek2.cpp (query rank),
    # src/llama-model.cpp (number of tensors), conversion/mistral3.py and src/models/mistral4.cpp (experts)
    Engine("llama.cpp", "b11739", _llama_cpp, ("fold", "free", "engine"), ("free", "engine")),
    # utils.py (model types), models/deepseek_v3.py, models/llama.py (rope_theta), models/olmo.py (config keys),
    # models/mistral4.py (shared experts)
    Engine(
        "mlx-lm",
        "0.32.2",
        _mlx_lm,
        ("fold", "free", "engine"),
        ("free", "engine"),
        Way(False, "it refuses the scales of FP8 weights in a fold, and reads blocks of 128 alone in a DeepSeek model"),
    ),
)
