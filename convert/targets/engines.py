"""Which engines serve a result, at which cache; without torch.

The one table of facts about engines in this repository: ``ENGINES`` says where each was read and what was run. What an
engine makes of a result is in the function of its name. ``tests/engines`` runs the engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model
from kvfold.convert.targets.mla.config import KERNEL_CACHES, KERNEL_HEADS, LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems

RANKS = (1, 2, 4, 8)  # of tensor parallelism
PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels take


@dataclass(frozen=True)
class Engine:
    """An engine: the version and the files that the facts are from, and which results were run there.

    A run compared greedy tokens with those of transformers in float32: ``fold`` is GQA or MQA of a llama (folds of
    other families count as read), ``free`` and ``engine`` are the layouts of MLA. What is not in ``ran`` was read in
    the sources only.
    """

    name: str
    version: str
    sources: str
    ran: tuple[str, ...]


ENGINES = (
    Engine(
        "transformers",
        "5.23.0",
        "models/youtu/modeling_youtu.py, models/deepseek_v3/modeling_deepseek_v3.py",
        ("fold", "free", "engine"),
    ),
    Engine(
        "vLLM",
        "0.32.0",
        "model_executor/layers/attention/mla_attention.py (sizes of the cache), v1/attention/backends/mla/prefill/"
        "flash_attn.py (sizes of heads), v1/attention/backends/mla/cpu_mla.py and amx_mla.py (512+64 only), "
        "model_executor/models/transformers/base.py (layout free)",
        ("free", "engine"),
    ),
    Engine(
        "SGLang",
        "0.5.23",
        "srt/models/deepseek_v2.py (config keys), srt/model_loader/utils.py (the way to transformers' code)",
        (),
    ),
    Engine(
        "llama.cpp",
        "b11739",
        "conversion/deepseek.py, conversion/phi.py (key/value heads), src/models/deepseek2.cpp (query rank), "
        "src/llama-model.cpp (number of tensors)",
        ("fold", "free", "engine"),
    ),
    Engine(
        "mlx-lm",
        "0.32.2",
        "utils.py (model types), models/deepseek_v3.py, models/llama.py (rope_theta), models/olmo.py (config keys)",
        ("fold", "free", "engine"),
    ),
)


@dataclass(frozen=True)
class Result:
    """What engines look at. A fold has ``kv_heads`` of ``head_dim`` dims; MLA has a split, and heads as stored.

    ``family`` is the ``model_type`` of a fold. ``older_rope``: the config has ``rope_theta`` beside
    ``rope_parameters``, as before transformers 5, or does not need it. ``lite``: llama.cpp expects queries without a
    latent.
    ``biased`` is a DeepSeek model with attention biases or scaled RoPE, as kvfold wrote it once: no result any more.
    """

    kind: Literal["fold", "free", "engine", "biased"]
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    split: tuple[int, int] = (0, 0)  # R, P
    heads: tuple[int, int, int] = (0, 0, 0)  # unrotated, rotary and value dims
    q_rank: int | None = None
    family: str = ""
    older_rope: bool = True
    vocabulary: int = 0

    @property
    def lite(self) -> bool:
        return self.layers in (26, 27) or (self.layers, self.vocabulary) == (48, 128256)

    def elements(self, ranks: int = 1) -> int:
        """KV-cache elements per token per layer on each of ``ranks`` tensor-parallel ranks.

        Key/value heads are shared out, one at least to each rank; a latent is whole on every rank.
        """
        return sum(self.split) if self.kind != "fold" else 2 * -(-self.kv_heads // ranks) * self.head_dim

    def per_rank(self) -> dict[str, int]:
        """``elements`` for every number of ranks in ``RANKS`` to which the heads can be shared out."""
        possible = [ranks for ranks in RANKS if self.query_heads % ranks == 0 and _shares(self.kv_heads, ranks)]
        return {str(ranks): self.elements(ranks) for ranks in possible}


def _shares(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


def folded_result(model: Model, kv_heads: int | None = None) -> Result:
    """Of ``model`` with ``kv_heads`` key/value heads, by default its own number."""
    size, family = model.geometry, model.family.model_type
    present = size.kv_heads if kv_heads is None else kv_heads
    older = _older_rope(family, model.config)
    return Result("fold", size.layers, size.heads, present, size.head_dim, family=family, older_rope=older)


def _older_rope(family: str, config: Mapping[str, Any]) -> bool:
    """Whether a reader that looks for ``rope_theta`` beside ``rope_parameters`` rotates as transformers does."""
    table = config.get("rope_parameters")
    assumed = family in ("llama", "mistral", "deepseek_v3") and table == {"rope_type": "default", "rope_theta": 10000.0}
    return not table or "rope_theta" in config or assumed


def target_result(geometry: Geometry, target: LatentTarget) -> Result:
    """Of a model that becomes ``target``."""
    nope, value = target.head_dims(geometry.head_dim)
    split, heads = (target.kv_rank, target.rope_dim), (nope, target.rope_dim, value)
    sizes: Any = {"split": split, "heads": heads, "q_rank": target.q_rank, "vocabulary": geometry.vocabulary}
    return Result(target.layout, geometry.layers, geometry.heads, **sizes)


def latent_result(config: Mapping[str, Any]) -> Result:
    """Of the ``config.json`` of a latent model."""
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    kind: Any = "free" if config["model_type"] == "youtu" else "engine"
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind == "engine" and (config.get("attention_bias") or table.get("rope_type", "default") != "default"):
        kind = "biased"
    return Result(
        kind,
        config["num_hidden_layers"],
        config["num_attention_heads"],
        split=(config["kv_lora_rank"], rope),
        heads=(nope, rope, value),
        q_rank=config.get("q_lora_rank"),
        vocabulary=config.get("vocab_size", 0),
        older_rope=_older_rope(config["model_type"], config),
    )


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a result.

    ``cache``: elements per token per layer on one device. ``how`` it serves the result, or why it does not; ``instead``
    are options of ``kvfold convert`` whose result it serves. ``ran``: seen in a run of that version, not only read.
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    instead: str | None
    ran: bool

    def to_text(self) -> str:
        """In a line."""
        if not self.serves:
            return f"{self.engine}: no, {self.how}" + (f"; instead: {self.instead}" if self.instead else "")
        notes = [*([] if self.ran else ["by its sources, not run"]), *([self.how] if self.how else [])]
        return ", ".join([f"{self.engine}: yes", *notes])


@dataclass(frozen=True)
class Way:
    """The answer of one engine: how it serves a result, or why not."""

    serves: bool
    how: str = ""


def verdicts(result: Result, alternatives: Mapping[str, Result] | None = None) -> list[Verdict]:
    """Of every engine. ``alternatives``: what the source could become instead, by its options, the best first."""
    return [_verdict(engine, result, alternatives or {}) for engine in ENGINES]


def _verdict(engine: Engine, result: Result, alternatives: Mapping[str, Result]) -> Verdict:
    ask = _WAYS[engine.name]
    way = ask(result)
    instead = (
        None if way.serves else next((options for options, other in alternatives.items() if ask(other).serves), None)
    )
    cache = result.elements() if way.serves else None
    ran = result.kind in engine.ran and result.family in ("", "llama")
    return Verdict(engine.name, engine.version, way.serves, cache, way.how, instead, ran)


def proposals(model: Model) -> list[LatentTarget]:
    """The targets that MLA kernels take and ``model`` can become, layout ``engine`` before ``free``."""
    targets = [LatentTarget(*split, layout=layout) for layout in ("engine", "free") for split in PROPOSED]
    return [target for target in targets if not latent_problems(model, target)]


def alternatives(model: Model, target: LatentTarget | None = None) -> dict[str, Result]:
    """What ``model`` could become, by its options: ``target`` in layout ``engine``, ``proposals``, a fold."""
    same = [] if target is None else [replace(target, layout="engine")]
    possible = [each for each in same if not latent_problems(model, each, allow_growth=True)]
    results = {latent_options(each): target_result(model.geometry, each) for each in [*possible, *proposals(model)]}
    fold = {"--to mqa": folded_result(model, 1)} if model.geometry.kv_heads > 1 else {}
    return results | fold


def latent_options(target: LatentTarget) -> str:
    """The options of ``kvfold convert`` that make ``target``."""
    options = f"--to mla --kv-rank {target.kv_rank} --rope-dim {target.rope_dim} --layout {target.layout}"
    return options if target.q_rank is None else f"{options} --q-rank {target.q_rank}"


def _transformers(result: Result) -> Way:
    absorb = "kvfold.attention.absorb(model) decodes over the latent cache"
    return Way(True, {"fold": "", "free": f"from 5.1 on; {absorb}"}.get(result.kind, absorb))


def _vllm(result: Result) -> Way:
    if result.kind == "fold":
        return Way(True)
    sizes = f"{', '.join(map(str, KERNEL_CACHES[:-1]))} or {KERNEL_CACHES[-1]}"
    if result.elements() not in KERNEL_CACHES:
        return Way(False, f"its MLA kernels take {sizes} cached elements, found {result.elements()}")
    if result.kind == "engine":
        return Way(
            False,
            "its own DeepSeek code gave other tokens than transformers on a CPU, equal ones with --model-impl "
            "transformers; GPUs were not tried",
        )
    backend = "by its Transformers backend"
    on_cpu = result.split == (512, 64)  # the only size of the CPU's kernel, which takes heads of any size
    if result.heads in KERNEL_HEADS:
        where = "on CPUs with AMX float32 needs --attention-backend CPU_MLA" if on_cpu else "on GPUs only"
        return Way(True, f"{backend}, {where}")
    heads = f"on GPUs its MLA prefill takes heads of {_spell(KERNEL_HEADS)} dims, found {_spell([result.heads])}"
    if on_cpu:
        return Way(True, f"{backend}, on CPUs only: {heads}")
    return Way(False, heads)


def _spell(heads: Sequence[tuple[int, int, int]]) -> str:
    return ", ".join(f"{nope}+{rope} and {value}" for nope, rope, value in heads)


def _sglang(result: Result) -> Way:
    if result.kind == "free":
        return Way(False, "it has no Youtu model; whether it runs transformers' code of one is not known")
    return Way(True, "" if result.kind == "fold" else "its kernels' sizes are not known")


def _llama_cpp(result: Result) -> Way:
    if result.kind == "fold" and result.family == "phi" and result.kv_heads != result.query_heads:
        return Way(False, "its converter gives Phi models as many key/value heads as query heads")
    if result.kind == "fold":
        return Way(True, "where its converter knows the tokenizer")
    if result.kind == "free":
        return Way(False, "it refuses attention biases (wrong number of tensors)")
    if result.lite and result.q_rank is not None:
        return Way(False, f"in models of {result.layers} layers it takes queries for ones without a latent")
    edit = 'with "q_lora_rank": 0 in the copy of config.json that is converted'
    needs_none = result.q_rank is not None or result.lite
    return Way(True, ", ".join(filter(None, ["" if needs_none else edit, "BPE tokenizers only"])))


def _mlx_lm(result: Result) -> Way:
    if result.kind == "free":
        return Way(False, "Model type youtu not supported")
    if result.family == "olmo":
        return Way(False, "it reads the older checkpoints of OLMo only, those of hf_olmo")
    if not result.older_rope:
        return Way(False, 'it ignores "rope_parameters" in config.json, and "rope_theta" is nowhere else')
    return Way(True)


def _current(way: Callable[[Result], Way]) -> Callable[[Result], Way]:
    """``way`` for what kvfold writes now; engines drop what a ``biased`` model has beyond theirs, without a word."""
    dropped = Way(False, "it drops or misreads attention biases and scaled RoPE in a DeepSeek model")
    return lambda result: dropped if result.kind == "biased" else way(result)


_WAYS: dict[str, Callable[[Result], Way]] = {
    "transformers": _transformers,
    "vLLM": _current(_vllm),
    "SGLang": _current(_sglang),
    "llama.cpp": _current(_llama_cpp),
    "mlx-lm": _current(_mlx_lm),
}
