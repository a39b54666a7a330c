"""The engines that serve a result, and at which cache size; without torch.

This file holds all facts about engines: ``ENGINES`` says in which sources they were read and what was run, and a
function for each engine (`WAYS`) answers for a `Result`. ``tests/engines`` runs the engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvfold.convert.families.model import Model
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.targets.mla.config import KERNEL_CACHES, KERNEL_HEADS, LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.results import Result, folded_result, latent_result_of

PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels take


@dataclass(frozen=True)
class Engine:
    """An engine: the version and the files that the facts are from, and which results were run there.

    A run compared greedy tokens with those of transformers in float32: ``fold`` is GQA or MQA of a llama (folds of
    other families count as read), ``free`` and ``engine`` are the layouts of MLA, ``own`` is layout kvfold, and in
    ``ran_experts`` those of a model with experts. What is in neither was read in the sources only.
    """

    name: str
    version: str
    sources: str
    ran: tuple[str, ...]
    ran_experts: tuple[str, ...] = ()


ENGINES = (
    Engine(
        "transformers",
        "5.23.0",
        "models/youtu/modeling_youtu.py, models/deepseek_v3/modeling_deepseek_v3.py, "
        "models/mistral4/modeling_mistral4.py (experts)",
        ("fold", "free", "engine", "own"),
        ("free", "engine"),
    ),
    Engine(
        "vLLM",
        "0.32.0",
        "model_executor/layers/attention/mla_attention.py (sizes of the cache), v1/attention/backends/mla/prefill/"
        "flash_attn.py (sizes of heads), v1/attention/backends/mla/cpu_mla.py and amx_mla.py (512+64 only), "
        "model_executor/models/transformers/base.py (layout free), moe.py and fusers/moe.py beside it (experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
    Engine(
        "SGLang",
        "0.5.23",
        "srt/models/deepseek_v2.py (config keys), EntryClass of srt/models/*.py (classes of folds), srt/models/phi.py "
        "and olmo.py (key/value heads), srt/model_loader/utils.py (the way to transformers' code)",
        (),
    ),
    Engine(
        "llama.cpp",
        "b11739",
        "conversion/deepseek.py, conversion/phi.py (key/value heads), src/models/deepseek2.cpp (query rank), "
        "src/llama-model.cpp (number of tensors), conversion/mistral3.py and src/models/mistral4.cpp (experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
    Engine(
        "mlx-lm",
        "0.32.2",
        "utils.py (model types), models/deepseek_v3.py, models/llama.py (rope_theta), models/olmo.py (config keys), "
        "models/mistral4.py (shared experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
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


def verdicts(result: Result, alternatives: Mapping[str, Result] | None = None) -> list[Verdict]:
    """Of every engine. ``alternatives``: what the source could become instead, by its options, the best first."""
    return [_verdict(engine, result, alternatives or {}) for engine in ENGINES]


def _verdict(engine: Engine, result: Result, alternatives: Mapping[str, Result]) -> Verdict:
    ask = WAYS[engine.name]
    way = ask(result)
    instead = (
        None if way.serves else next((options for options, other in alternatives.items() if ask(other).serves), None)
    )
    cache = result.elements() if way.serves else None
    runs = engine.ran_experts if result.experts else engine.ran
    ran = result.kind in runs and result.family in ("", "llama") and not way.read
    return Verdict(engine.name, engine.version, way.serves, cache, way.how, instead, ran)


def proposals(model: Model) -> list[LatentTarget]:
    """The targets that MLA kernels take and ``model`` can become, layout ``engine`` before ``free``."""
    targets = [LatentTarget(*split, layout=layout) for layout in ("engine", "free") for split in PROPOSED]
    return [target for target in targets if not latent_problems(model, target)]


def alternatives(model: Model, target: LatentTarget | None = None) -> dict[str, Result]:
    """What ``model`` could become, by its options: ``target`` in layout ``engine``, ``proposals``, a fold."""
    same = [] if target is None else [replace(target, layout="engine")]
    possible = [each for each in same if not latent_problems(model, each, allow_growth=True)]
    results = {latent_options(each): latent_result_of(model, each) for each in [*possible, *proposals(model)]}
    fold = {"--to mqa": folded_result(model, 1)} if model.geometry.kv_heads > 1 else {}
    return results | fold


def latent_options(target: LatentTarget) -> str:
    """The options of ``kvfold convert`` that make ``target``."""
    options = f"--to mla --kv-rank {target.kv_rank} --rope-dim {target.rope_dim} --layout {target.layout}"
    return options if target.q_rank is None else f"{options} --q-rank {target.q_rank}"


@dataclass(frozen=True)
class Way:
    """The answer of one engine: how it serves a result, or why not. ``read``: only in its sources, whatever was run."""

    serves: bool
    how: str = ""
    read: bool = False


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
    backend = "by its Transformers backend, " if result.experts or result.kind == "free" else ""
    on_cpu = result.split == (512, 64)  # the only size of the CPU's kernel, which takes heads of any size
    if result.heads in KERNEL_HEADS:
        where = "on CPUs with AMX float32 needs --attention-backend CPU_MLA" if on_cpu else "on GPUs only"
        return Way(True, f"{backend}{where}", read=not on_cpu)
    heads = f"on GPUs its MLA prefill takes heads of {_spell(KERNEL_HEADS)} dims, found {_spell([result.heads])}"
    if on_cpu:
        return Way(True, f"{backend}on CPUs only: {heads}")
    return Way(False, heads)


def _spell(heads: Sequence[tuple[int, int, int]]) -> str:
    return ", ".join(f"{nope}+{rope} and {value}" for nope, rope, value in heads)


_NOT_IN_SGLANG = ("nemotron", "smollm3")  # families whose class no EntryClass of srt/models names


def _sglang(result: Result) -> Way:
    if result.experts or result.kind == "free":
        name = "Mistral4" if result.experts else "Youtu"
        return Way(False, f"it has no {name} model; whether it runs transformers' code of one is not known")
    if result.family in _NOT_IN_SGLANG:
        return Way(False, f"it has no {result.family} model; whether it runs transformers' code of one is not known")
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
    if result.lite and result.q_rank is not None:
        return Way(False, f"in models of {result.layers} layers it takes queries for ones without a latent")
    edits = [] if result.q_rank is not None or result.lite else ['"q_lora_rank": 0']
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


def _current(way: Callable[[Result], Way]) -> Callable[[Result], Way]:
    """``way`` for what kvfold writes now; engines drop what a ``biased`` model has beyond theirs, without a word."""
    dropped = Way(False, "it drops or misreads attention biases and scaled RoPE in a DeepSeek model")
    return lambda result: dropped if result.kind == "biased" else way(result)


def _stock(way: Callable[[Result], Way]) -> Callable[[Result], Way]:
    """``way`` for stock classes: what engines make of code that a checkpoint brings along was not looked at."""
    unknown = Way(False, "the result brings its own modeling code; whether it runs such code was neither run nor read")
    return lambda result: unknown if result.kind == "own" else way(result)


def _plain(way: Callable[[Result], Way]) -> Callable[[Result], Way]:
    """``way`` for plain language models: what engines make of multimodal wrappers was not looked at."""
    unknown = Way(False, "how it serves multimodal wrappers was neither run nor read")
    return lambda result: unknown if result.family in WRAPPERS else way(result)


def _quantized(way: Callable[[Result], Way], kept: Way) -> Callable[[Result], Way]:
    """``way``, and ``kept`` in place of a yes where weights beside the attention are quantized."""
    return lambda result: kept if result.kept and way(result).serves else way(result)


_SCALES = Way(
    False, "it refuses the scales of FP8 weights in a fold, and reads blocks of 128 alone in a DeepSeek model"
)
_UNSEEN = Way(False, "whether it serves FP8 weights beside dense attention was neither run nor read")

WAYS: dict[str, Callable[[Result], Way]] = {
    "transformers": _transformers,
    "vLLM": _stock(_plain(_current(_vllm))),
    "SGLang": _quantized(_stock(_plain(_current(_sglang))), _UNSEEN),
    "llama.cpp": _stock(_plain(_current(_llama_cpp))),
    "mlx-lm": _quantized(_stock(_plain(_current(_mlx_lm))), _SCALES),
}
