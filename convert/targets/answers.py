"""How each engine serves a result, or why not: a function for each engine in ``ENGINES``; without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.targets.mla.config import KERNEL_CACHES, KERNEL_HEADS
from kvfold.convert.targets.results import Result


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
