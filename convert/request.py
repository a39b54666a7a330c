"""The options of each command and their valid values, without torch or an open checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from kvfold.convert.errors import format_option
from kvfold.convert.formatting import parse_number
from kvfold.convert.methods import registry
from kvfold.convert.methods.registry import DEFAULT, Method
from kvfold.convert.options import (
    Request,
    collect_options,
    device_option,
    dtype_option,
    option,
    seed_option,
    seq_len_option,
    trust_option,
)

AttentionKind = Literal["gqa", "mqa", "mla"]
Layout = Literal["free", "engine", "kvfold"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheRounding = Literal["fp8", "int8", "int4", "int3", "int2"]
TrainingDtype = Literal["auto", "float32", "bfloat16"]
Steps = int | Literal["auto"]

TARGETS: tuple[str, ...] = get_args(AttentionKind)
# Options that --effort stands for. KL of SmolLM2-135M in MLA 128+64 on prose and code: quick 0.149,
# 0.148; normal 0.099, 0.110; thorough 0.068, 0.082 (recipes/results/real_models.json).
EFFORTS: dict[str, dict[str, Any]] = {
    "quick": {},
    "normal": {"refine": 50, "polish": "100k", "repeat_text": True},
    "thorough": {"refine": 200, "polish": "400k", "repeat_text": True},
}
# Tokens of a sequence with --seq-len auto: measured in convert/README.md, "The loss by position".
AUTO_LENGTH = 512
DEFAULT_LAYOUT: Layout = "free"
# Tokens of the sequences on which the loss by position is measured, in models of that context;
# chosen.
LONG_LENGTH = 2048
SELF = "self"  # --calibration self or self:SHARE: the source generates the text ...
SELF_TOKENS = 24_576  # ... so many tokens at once: chosen, not tuned; memory grows with them


def count_held_out(samples: int) -> int:
    """The number of held-out sequences for ``samples`` calibration sequences: an eighth, at least
    8.
    """
    return max(8, math.ceil(samples / 8))


# Options of several requests; keywords replace what differs in one of them.
# An empty path, as from an unset shell variable, would mean the current folder, which ``overwrite``
# replaces.
_source = partial(option, argument=True, rule="a folder or a hub id", check=str.strip, runs=True)
_numbers = partial(
    option, metavar="N,N", rule="positive numbers separated by commas, such as 2048,8192", minimum=1
)
_latent = partial(option, None, targets=("mla",))
_fold = partial(option, None, targets=("gqa", "mqa"))
_ROUNDED_CACHE = (
    "a KV cache that the engine rounds (simulated): e4m3 with scale 1, or integers in groups of 32."
)
_CACHE = (
    f"Measure OUT with {_ROUNDED_CACHE} MODEL keeps its cache; MODEL MODEL measures the rounding"
    " alone."
)


@dataclass(frozen=True)
class RunRequest(Request):
    """The options that all commands share which run MODEL on text."""

    model: str = _source()
    _: KW_ONLY
    seed: int = seed_option()
    device: Device = device_option()
    dtype: Dtype = dtype_option()
    quiet: bool = option(False, "Print no progress and no summary.", runs=True)
    trust_remote_code: bool = trust_option()


@dataclass(frozen=True)
class CalibratedRequest(RunRequest):
    """The options that all commands share which fit a conversion to calibration text."""

    _: KW_ONLY
    layout: Layout | None = option(
        None,
        f"Layout of an MLA checkpoint (default {DEFAULT_LAYOUT}, or kvfold where no stock"
        " class can hold the result). free is for transformers and vLLM's Transformers backend;"
        " engine is for vLLM, SGLang, llama.cpp and mlx-lm, and loses a little more; kvfold brings"
        " modeling code, for models that no stock MLA class can hold.",
        targets=("mla",),
    )
    context: int | None = _latent(
        "Shorten the context of an MLA result to N tokens, for a stock class that has neither the"
        " source's sliding windows nor other frequencies for long texts.",
        minimum=2,
    )
    calibration: tuple[str, ...] = option(
        (),
        "Text that resembles the model's use: a text file, a .jsonl file or a dataset name; self:"
        " MODEL generates it. Repeat the option to mix texts, in equal shares or by weight:"
        " --calibration FILE:3 --calibration FILE2:1. A third of the text of a model with a chat"
        " template is self, unless the option names it; self:0 turns this off.",
        metavar="FILE|DATASET|self",
        rule="the name of a text file or dataset",
        multiple=True,
        check=str.strip,
    )
    samples: int = option(128, "Calibration sequences.", minimum=1)
    seq_len: Steps = option(
        "auto",
        f"Tokens per sequence; auto: {AUTO_LENGTH}, or MODEL's context, if it is shorter, in as"
        f" many sequences as hold SAMPLES x {AUTO_LENGTH} tokens.",
        metavar="N|auto",
        minimum=2,
        rule="a whole number of at least 2, or auto",
    )
    refine: Steps = option(
        0,
        "Steps of training each layer's attention to reconstruct the source's, without labels.",
        metavar="STEPS|auto",
        rule="a number of steps or auto",
    )
    precision: TrainingDtype = option(
        "auto",
        "Dtype of products in calibration passes and training; auto: the faster, measured. Held-out"
        " text: float32.",
    )
    dtype: Dtype = dtype_option(help="Stored dtype; auto keeps the source's dtype.")


@dataclass(frozen=True)
class ConvertRequest(CalibratedRequest):
    """The options of one conversion. The fields are those of ``kvfold convert`` with underscores,
    which ``--help`` explains.

    None for ``method`` or ``group`` means the best choice for the target (see ``resolved_method``).
    ``method`` and ``objective`` are registered names, or ``MODULE:NAME`` with a module that
    registers NAME (`methods.registry`). Path objects are converted to strings. Raises one
    InputError with every problem.

    >>> ConvertRequest(model="MODEL", out="OUT", to="gqa", kv_heads=8).resolved_method
    'principal'
    """

    out: str = _source(rule="the path of an output folder")
    to: AttentionKind = option(help="Attention kind to convert to; required without --recipe.")
    kv_heads: int | None = option(
        None, "Key/value heads of the result (gqa).", minimum=1, targets=("gqa",)
    )
    kv_rank: int | None = _latent(
        "Rank of the latent: R cache elements per token per layer (mla).", metavar="R", minimum=1
    )
    rope_dim: int | None = _latent(
        "Rotary key dims: P cache elements per token per layer (mla).", metavar="P"
    )
    budget: int | None = _latent("Choose R + P = N by measured drift (mla).", minimum=4)
    method: str | None = option(
        None,
        f"Default: {DEFAULT} (calibrated). gqa, mqa: {', '.join(registry.list_methods('gqa'))};"
        f" mla: {', '.join(registry.list_methods('mla'))}; or MODULE:NAME.",
        metavar="NAME",
    )
    objective: str | None = _fold(
        f"Error that a fold minimizes (gqa, mqa): {', '.join(registry.list_objectives())}, or"
        f" MODULE:NAME. Default: {registry.DEFAULT_OBJECTIVE}.",
        metavar="NAME",
    )
    group: Literal["similar", "contiguous"] | None = _fold(
        "How to group the heads that will share keys and values: by similarity, or neighbors."
    )
    allow_growth: bool = option(
        False,
        "Allow targets whose cache is not smaller than the source's; more key/value heads are exact"
        " repetitions, for tensor parallelism.",
        runs=True,
    )
    effort: Literal["quick", "normal", "thorough"] | None = option(
        None,
        "Time to spend: quick only fits (the default), normal also refines in 50 steps and polishes"
        " on 100k tokens, thorough in 200 and on 400k. Stands for --refine, --polish and"
        " --repeat-text, which are for experts.",
    )
    polish: Steps | str = option(
        0,
        "Then steps of about 1024 tokens (or a number of tokens: 200k, 1M) of training all layers"
        " against MODEL's predictions; needs memory for the whole model.",
        metavar="STEPS|TOKENS|auto",
        rule="a number of steps, a number of tokens above 0 such as 200k or 1M, or 'auto'",
        check=lambda value: isinstance(value, int) or parse_number(value),
    )
    cache: CacheRounding | None = option(
        None,
        f"Fit, train and measure OUT with {_ROUNDED_CACHE}",
    )
    repeat_text: bool = option(
        False, "Polish on the text again where it has fewer tokens than --polish."
    )
    positions: bool = option(
        True,
        "Measure the loss by position on up to four longer sequences; fewer, at least one, where"
        " they would take over a tenth of the time of the fit.",
        runs=True,
    )
    max_shard_size: str = option(
        "5GB",
        "Maximum size of a weight file.",
        metavar="SIZE",
        rule="a size with its unit, such as 5GB or 500MB",
        check=partial(parse_number, unit="B"),
    )
    fresh: bool = option(
        False, "Discard the finished layers of an interrupted run of OUT and start over.", runs=True
    )
    dry_run: bool = option(
        False, "Print the plan, memory and disk space; write nothing.", runs=True
    )
    overwrite: bool = option(
        False, "Replace OUT; the old one stays intact until the new one is on disk.", runs=True
    )

    def __post_init__(self) -> None:
        # From here on an effort is the options that it stands for: they are recorded, and compared
        # when a run resumes.
        if str(self.effort) in EFFORTS and f"{self.refine}{self.polish}" == "00":
            for name, value in (EFFORTS[str(self.effort)] | {"effort": None}).items():
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def resolved_method(self) -> str:
        """The name of the method, which is the default one if ``method`` is None."""
        return self.method or DEFAULT

    @property
    def chosen_method(self) -> Method:
        """The conversion method, looked up by name. Raises InputError if the target has no method
        with this name.
        """
        return registry.find_method(self.resolved_method, self.to)

    @property
    def result_kv_heads(self) -> int:
        """The number of key/value heads of a GQA or MQA result: ``kv_heads``, or 1 for mqa."""
        return self.kv_heads or 1

    @property
    def calibrated(self) -> bool:
        """True if the conversion runs the model on calibration text."""
        return self.chosen_method.reads_text or bool(self.refine) or bool(self.polish)

    @property
    def calibration_length(self) -> int:
        """The number of tokens per calibration sequence. ``seq_len`` must not be ``auto`` any more
        (see `resolve_auto_length`).
        """
        assert isinstance(self.seq_len, int)
        return self.seq_len

    def resolve_auto_length(self, positions: int) -> "ConvertRequest":
        """The request with ``seq_len="auto"`` replaced by a length that a model with so many
        ``positions`` supports. If that is shorter than usual, ``samples`` grows.
        """
        if self.seq_len != "auto":
            return self
        length = min(AUTO_LENGTH, positions)
        return replace(self, samples=math.ceil(self.samples * AUTO_LENGTH / length), seq_len=length)

    @property
    def shard_bytes(self) -> int:
        """The largest size of a weight file in bytes."""
        return parse_number(self.max_shard_size, "B") or 0

    def collect_result_options(self) -> dict[str, Any]:
        """The options that determine the result, by name. An MLA layout is the requested one; for
        some models the plan chooses ``kvfold`` instead of the default.
        """
        left_out = {"calibration"}
        if not self.calibrated:
            left_out |= {"samples", "seq_len", "refine", "polish"}
            if not self.chosen_method.seeded:
                left_out.add("seed")
        options = super().collect_result_options()
        options |= {"max_shard_size": self.shard_bytes, "method": self.resolved_method}
        if self.to == "mla":
            options["layout"] = self.layout or DEFAULT_LAYOUT
        return {name: value for name, value in options.items() if name not in left_out}

    def list_problems(self) -> Iterator[tuple[str, str]]:
        method = self.chosen_method
        if self.objective is not None:
            registry.find_objective(self.objective)
        for name, spec in collect_options(type(self)).items():
            # Layout kvfold also allows GQA and MQA, for families whose stock class cannot represent
            # them.
            given = getattr(self, name) not in (None, False, "kvfold")
            if given and spec.targets and self.to not in spec.targets:
                yield name, f"{format_option(name)} has no effect with --to {self.to}; omit it"
        if self.to == "gqa" and self.kv_heads is None:
            yield (
                "kv_heads",
                "--to gqa needs --kv-heads, the number of key/value heads to keep; `kvfold inspect"
                " MODEL` lists the possible numbers",
            )
        by_budget = self.budget is not None
        split = (self.kv_rank, self.rope_dim)
        if self.to == "mla" and any((size is None) != by_budget for size in split):
            yield (
                "budget" if by_budget else "kv_rank",
                "--to mla needs --kv-rank and --rope-dim, or else --budget, in KV-cache elements"
                " per token per layer",
            )
        read_text = {
            "budget": self.budget,
            "objective": self.objective,
            "layout": self.layout == "engine",
            "group": self.group == "similar",
            "calibration": self.calibration and not self.calibrated,
            "cache": self.cache and not self.calibrated,
        }
        for name, wanted in read_text.items():
            if wanted and not method.reads_text:
                needs = f"needs text, but --method {self.resolved_method} reads none"
                yield name, f"{format_option(name)} {needs}; omit it, or use --method {DEFAULT}"
        if self.effort:
            yield "effort", "--effort chooses --refine and --polish; omit it, or these two"


@dataclass(frozen=True)
class DriftRequest(RunRequest):
    """The options of ``kvfold drift``, which compares MODEL and OUT on ``samples`` sequences of
    ``seq_len`` tokens.
    """

    out: str = _source()
    text: str | None = option(
        None,
        "Text to measure on (.txt, .jsonl); default: held-out text that ships with kvfold.",
        metavar="FILE",
    )
    samples: int = option(16, "Number of sequences.", minimum=1)
    seq_len: int = seq_len_option()
    cache: CacheRounding | None = option(None, _CACHE)


@dataclass(frozen=True)
class SweepRequest(CalibratedRequest):
    """The options of ``kvfold sweep``, which fits and measures several targets for MODEL.

    ``targets`` is a string as on the command line, or a list.
    """

    targets: tuple[str, ...] = option(
        (),
        "gqa:HEADS, mqa, mla:ELEMENTS (kvfold chooses the split) or mla:RANK+ROTARY, as in gqa:4,2"
        " mqa mla:576,512+64. Default: a few that suit MODEL.",
        metavar="TARGET...",
        multiple=True,
    )
    within: float | None = option(
        None,
        "Largest acceptable rise in perplexity (0.05 is 5 %); default: the limits of the verdict"
        ' "near the source". The smallest target within it is recommended.',
        metavar="X",
        rule="a number above 0 and below 1; 0.05 accepts 5 % more perplexity",
        check=lambda value: 0 < value < 1,
    )
    out: str | None = option(
        None, "Also convert MODEL to the recommended target, into the folder OUT.", metavar="OUT"
    )


@dataclass(frozen=True)
class EvalRequest(RunRequest):
    """The options of ``kvfold eval``, which compares MODEL and OUT on tasks and long contexts."""

    out: str = _source()
    tasks: tuple[str, ...] = option(
        (),
        "Tasks: replies, which compares what the models write; or of lm-evaluation-harness, by name"
        " or as FILE.yaml (needs the eval extra).",
        metavar="NAME,NAME",
    )
    limit: int | None = option(
        None,
        "Maximum number of documents per lm-evaluation-harness task; default: all.",
        minimum=1,
    )
    lengths: tuple[int, ...] = _numbers(
        (),
        "Context lengths in tokens; default: 256,512,1024, or MODEL's maximum.",
    )
    samples: int = option(16, "Documents per length, and prompts of replies.", minimum=2)
    text: str | None = option(
        None,
        "Text to hide words in; default: held-out text that ships with kvfold.",
        metavar="FILE",
    )
    retrieval: bool = option(
        True, "Measure retrieval from long texts too, besides the loss by position and --tasks."
    )
    batch: int = option(1, "Task documents per batch.", minimum=1)
    cache: CacheRounding | None = option(None, _CACHE)

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """The names of the tasks that lm-evaluation-harness runs."""
        return tuple(task for task in self.tasks if task != "replies")


@dataclass(frozen=True)
class BenchRequest(Request):
    """The options of ``kvfold bench``, which times every model for ``seconds`` at each context
    length and batch size.
    """

    models: tuple[str, ...] = option((), argument=True, metavar="[MODEL]...")
    contexts: tuple[int, ...] = _numbers((2048,), "Tokens in the cache.")
    batches: tuple[int, ...] = _numbers((1,), "Sequences decoded together.")
    shape: str | None = option(
        None,
        "Time every attention kind with random weights in a known shape, such as llama-2-7b.",
        metavar="NAME",
    )
    layers: int | None = option(None, "Number of layers with --shape.", minimum=1)
    device: Device = device_option()
    dtype: Dtype = dtype_option()
    prefill_tokens: int = option(2048, "Maximum number of tokens to prefill; 0 skips the prefill.")
    seconds: float = option(4.0, "Seconds to time each model, context and batch.", metavar="X")
    quiet: bool = option(False, "Print no progress.")

    def list_problems(self) -> Iterator[tuple[str, str]]:
        if not self.models and self.shape is None:
            yield "models", "nothing to time; name a MODEL, or use --shape llama-2-7b"
        if self.layers is not None and self.shape is None:
            yield "layers", "--layers has no effect without --shape; omit it"


@dataclass(frozen=True)
class ChatRequest(Request):
    """The options of ``kvfold chat``: a conversation with MODEL, and with ``against`` beside it."""

    model: str = _source()
    against: str | None = option(
        None,
        "A second model, such as the source of MODEL: both answer every prompt.",
        metavar="MODEL2",
    )
    max_new_tokens: int = option(200, "Longest answer, in tokens.", minimum=1)
    device: Device = device_option()
    dtype: Dtype = dtype_option()
    trust_remote_code: bool = trust_option()
