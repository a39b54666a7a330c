"""The options of a conversion and the values that they take. No checkpoint is opened, torch is not imported."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvfold.convert.errors import InputError, did_you_mean, opt
from kvfold.convert.methods.registry import DEFAULT, Method, find_method, find_objective, methods_of, objectives
from kvfold.convert.options import Request, option, run_only, specs
from kvfold.convert.sizes import parse_size, size_expected

Target = Literal["gqa", "mqa", "mla"]
Grouping = Literal["similar", "contiguous"]
Layout = Literal["free", "engine", "kvfold"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

TARGETS: tuple[str, ...] = get_args(Target)
GROUPINGS: tuple[str, ...] = get_args(Grouping)
LAYOUTS: tuple[str, ...] = get_args(Layout)
DEVICES: tuple[str, ...] = get_args(Device)
DTYPES: tuple[str, ...] = get_args(Dtype)

DEFAULT_LAYOUT: Layout = "free"

SELF = "self"  # --calibration: the source writes the text


def held_out_count(samples: int) -> int:
    """Held-out sequences beside ``samples`` calibration sequences: an eighth, at least 8."""
    return max(8, math.ceil(samples / 8))


def _not_blank(rule: str) -> Callable[[str], str | None]:
    """A check of paths. An empty one, as an unset shell variable gives, would mean the current folder: with
    ``overwrite`` that would be replaced.
    """
    return lambda text: None if text.strip() else f"{rule} (is a shell variable unset?)"


_SOURCE = "a folder or a hub id"
_FOLDER = "a folder to write"


def _registered(known: Callable[[], tuple[str, ...]]) -> Callable[[str], str | None]:
    """The rule for a name that ``known`` lists, or one of a module, which is imported when the request is complete."""

    def rule(name: str) -> str | None:
        if ":" in name or name in known():
            return None
        return f"one of {', '.join(known())}, or MODULE:NAME{did_you_mean(name, known())}"

    return rule


def _texts_rule(names: str | tuple[Any, ...]) -> str | None:
    each = names if isinstance(names, tuple) else (names,)
    if not all(isinstance(name, str) and name.strip() for name in each):
        return "the name of a text file or dataset"
    if len(set(each)) < len(each):
        return "different texts"
    return f"either {SELF} or names of texts" if SELF in each and len(each) > 1 else None


@dataclass(frozen=True, repr=False)
class ConvertRequest(Request):
    """One conversion. Field names are the options of ``kvfold convert`` with underscores; its ``--help`` explains them.

    ``method`` and ``group`` left at None take the best there is for the target (see ``resolved_method``). ``method``
    and ``objective`` are registered names, or ``MODULE:NAME`` of a module that registers one (`methods.registry`).
    Paths may be path objects; they become text. Raises InputError, with every problem at once.

    >>> ConvertRequest(model="MODEL", out="OUT", to="gqa", kv_heads=8)
    ConvertRequest(model='MODEL', out='OUT', to='gqa', kv_heads=8)
    """

    model: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE, runs=True)
    out: str = option(argument=True, check=_not_blank(_FOLDER), rule=_FOLDER, runs=True)
    to: Target = option(help="Attention kind to convert to; required without --recipe.", panel="Target")
    kv_heads: int | None = option(
        None, help="Key/value heads to keep (gqa).", panel="Target", metavar="N", least=1, targets=("gqa",)
    )
    kv_rank: int | None = option(
        None,
        help="Rank of the latent: R cache elements per token per layer (mla).",
        panel="Target",
        metavar="R",
        least=1,
        targets=("mla",),
    )
    rope_dim: int | None = option(
        None,
        help="Rotary key dims: P cache elements per token per layer (mla).",
        panel="Target",
        metavar="P",
        least=0,
        targets=("mla",),
    )
    budget: int | None = option(
        None, help="Choose R + P = N by measured drift (mla).", panel="Target", metavar="N", least=4, targets=("mla",)
    )
    q_rank: int | None = option(
        None,
        help="Also factor the queries through a latent of rank N (mla).",
        panel="Target",
        metavar="N",
        least=1,
        targets=("mla",),
    )
    method: str | None = option(
        None,
        help="principal (calibrated; default), mean, first, random; mla: principal, svd; or MODULE:NAME.",
        panel="Target",
        metavar="NAME",
        check=_registered(methods_of),
    )
    objective: str | None = option(
        None,
        help="Error that a fold minimizes (gqa, mqa): scores (default), or MODULE:NAME.",
        panel="Target",
        metavar="NAME",
        check=_registered(objectives),
        targets=("gqa", "mqa"),
    )
    group: Grouping | None = option(
        None, help="Heads that share: similar ones, or neighbors.", panel="Target", targets=("gqa", "mqa")
    )
    layout: Layout | None = option(
        None,
        help=f"Layout of an MLA checkpoint (default {DEFAULT_LAYOUT}).",
        panel="Target",
        metavar="|".join(LAYOUTS),
        targets=("mla",),
    )
    rotate_latent: bool = option(
        False,
        help="Mix the latent's channels, for an FP8 or INT8 KV cache (mla).",
        panel="Target",
        targets=("mla",),
    )
    allow_growth: bool = option(
        False, help="Allow targets whose cache is not smaller than the source's.", panel="Target", runs=True
    )
    calibration: str | tuple[str, ...] | None = option(
        None,
        help="Text like that of the model's use: plain text, .jsonl rows, a datasets name; self: MODEL writes it. "
        "Repeated: equal shares of each.",
        panel="Calibration",
        metavar="FILE|DATASET|self",
        check=_texts_rule,
        rule="the name of a text file or dataset",
    )
    samples: int = option(128, help="Calibration sequences.", panel="Calibration", least=1)
    seq_len: int = option(512, help="Tokens per sequence.", panel="Calibration", least=2)
    seed: int = option(
        0, help="Seed of the sequences drawn (and of --method random).", panel="Calibration", least=0, below=2**63
    )
    refine: int | Literal["auto"] = option(
        0,
        help="Reconstruction steps per layer, without labels.",
        panel="Refinement",
        metavar="STEPS|auto",
        least=0,
        rule="a number of steps or auto",
    )
    polish: int | Literal["auto"] = option(
        0,
        help="Then steps of all layers together, against MODEL's predictions; needs memory for a whole model.",
        panel="Refinement",
        metavar="STEPS|auto",
        least=0,
        rule="a number of steps or auto",
    )
    device: Device = option("auto", help="auto: the GPU where there is one.", panel="Running", runs=True)
    dtype: Dtype = option(
        "auto", help="Stored dtype; auto keeps the source's (bfloat16 where that is quantized).", panel="Running"
    )
    keep_quantized: bool = option(
        False, help="Leave FP8 or MXFP4 weights outside the attention as they are.", panel="Running"
    )
    max_shard_size: int | str = option(
        "5GB", help="Largest weight file.", panel="Running", metavar="SIZE", check=size_expected
    )
    spill: str | None = option(
        None,
        help="Keep hidden states of the text in a file in DIR, not in memory; it needs no name.",
        panel="Running",
        metavar="DIR",
        runs=True,
    )
    dry_run: bool = option(
        False, help="Print the plan, memory and disk space; write nothing.", panel="Running", runs=True
    )
    resume: bool = option(
        False, help="Resume an interrupted calibrated run at its last finished layer.", panel="Running", runs=True
    )
    overwrite: bool = option(
        False, help="Replace OUT; the old one stays intact until the new one is on disk.", panel="Running", runs=True
    )
    quiet: bool = option(False, help="No progress, no summary.", panel="Running", runs=True)
    trust_remote_code: bool = option(False, help="Allow code in the checkpoint to run.", panel="Running", runs=True)

    @property
    def resolved_method(self) -> str:
        return self.method or DEFAULT

    @property
    def chosen_method(self) -> Method:
        """The registered method. Raises InputError for a name that the target has no method of."""
        return find_method(self.resolved_method, self.to)

    @property
    def resolved_layout(self) -> Layout:
        """The layout of an MLA result. Without text there is nothing to calibrate layout ``engine`` on."""
        return self.layout or (DEFAULT_LAYOUT if self.chosen_method.reads_text else "free")

    @property
    def calibrated(self) -> bool:
        """Whether the conversion runs the model over calibration text."""
        return self.chosen_method.reads_text or bool(self.refine) or bool(self.polish)

    @property
    def texts(self) -> tuple[str, ...]:
        """The names in ``calibration``."""
        if self.calibration is None or isinstance(self.calibration, str):
            return () if self.calibration is None else (self.calibration,)
        return self.calibration

    @property
    def shard_bytes(self) -> int:
        return parse_size(self.max_shard_size) or 0

    def result_options(self) -> dict[str, Any]:
        """The options that decide the result, without those that only say where and how to run."""
        left_out = {"calibration", *run_only(type(self))}
        if not self.calibrated:
            left_out |= {"samples", "seq_len", "refine", "polish"}
            if not self.chosen_method.seeded:
                left_out.add("seed")
        given = {name: value for name, value in vars(self).items() if name not in left_out}
        given["max_shard_size"] = self.shard_bytes
        resolved = {"method": self.resolved_method} | ({"layout": self.resolved_layout} if self.to == "mla" else {})
        return {name: value for name, value in given.items() if value is not None and value is not False} | resolved

    def problems(self) -> Iterator[tuple[str, str]]:
        """Values that do not go together, and methods that the target does not have."""
        to, principal = self.to, opt("method", DEFAULT)
        if to == "gqa" and self.kv_heads is None:
            heads = "the number of key/value heads to keep; `kvfold inspect` lists them"
            yield "kv_heads", f"{opt('to', to)} needs {opt('kv_heads')}, {heads}"
        for name, spec in specs(type(self)).items():
            targets, value = spec.details.targets, getattr(self, name)
            # Layout kvfold also holds folds, of families whose stock class cannot.
            if (
                targets
                and to in TARGETS
                and to not in targets
                and value is not None
                and value is not False
                and value != "kvfold"
            ):
                some = " or ".join(opt("to", target) for target in targets)
                yield name, f"{opt(name)} needs {some}, not {opt('to', to)}; leave it out"
        if to not in TARGETS:
            return
        method = find_method(DEFAULT, to)
        try:
            if isinstance(self.method, str) and (":" in self.method or self.method in methods_of()):
                method = self.chosen_method
        except InputError as error:
            yield "method", error.message
        named = opt("method", self.resolved_method)
        calibrated = method.reads_text or bool(self.refine) or bool(self.polish)
        if self.objective is not None and to != "mla" and not method.takes_objective:
            yield "objective", f"{opt('objective')}: {named} minimizes none; leave it out, or use {principal}"
        if isinstance(self.objective, str) and ":" in self.objective:
            try:
                find_objective(self.objective)
            except InputError as error:
                yield "objective", error.message
        if to == "mla":
            yield from self._latent_problems(method)
        elif self.group == "similar" and not method.reads_text:
            unread = f"compares heads on text, which {named} does not read"
            yield "group", f"{opt('group', 'similar')} {unread}; leave it out, or use {principal}"
        if self.keep_quantized and self.dtype not in ("auto", "bfloat16"):
            either = f"{opt('keep_quantized', True)} needs {opt('dtype', 'bfloat16')} or auto"
            yield "keep_quantized", f"{either}, not {self.dtype}; leave one of the two out"
        if not calibrated:
            without = f"{named} without {opt('refine')} or {opt('polish')}"
            if self.calibration is not None:
                yield "calibration", f"{opt('calibration')}: {without} reads no text; leave it out, or use {principal}"
            if self.spill is not None:
                yield "spill", f"{opt('spill')}: {without} has no hidden states to keep; leave it out"

    def _latent_problems(self, method: Method) -> Iterator[tuple[str, str]]:
        split = (self.kv_rank is not None, self.rope_dim is not None)
        both = f"{opt('kv_rank')} and {opt('rope_dim')}"
        named, principal = opt("method", self.resolved_method), opt("method", DEFAULT)
        if self.budget is not None and any(split):
            yield "budget", f"{opt('budget')} chooses {both} itself; give either it or the two"
        if self.budget is None and not all(split):
            elements = "(KV-cache elements per token per layer)"
            yield "kv_rank", f"{opt('to', 'mla')} needs {both} {elements}, or {opt('budget')}"
        if self.layout == "engine" and not method.reads_text:
            calibrates = f"{opt('layout', 'engine')} calibrates the latent's norm on text"
            yield "layout", f"{calibrates}, which {named} does not read; use {principal}"
        if self.rotate_latent and (self.layout or DEFAULT_LAYOUT) == "engine":
            larger = "increases the error of an FP8 cache with"
            way_out = f"leave it out, or use {opt('layout', 'free')}"
            yield "rotate_latent", f"{opt('rotate_latent', True)} {larger} {opt('layout', 'engine')}; {way_out}"
        if self.budget is not None and not method.reads_text:
            yield (
                "budget",
                f"{opt('budget')} chooses by measured drift, and {named} reads no text; use {principal}",
            )


@dataclass(frozen=True, repr=False)
class DriftRequest(Request):
    """A comparison by ``kvfold drift``: ``samples`` sequences of ``seq_len`` tokens through MODEL and OUT."""

    model: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE)
    out: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE)
    text: str | None = option(
        None,
        help="Text to measure on (.txt, .jsonl); default: held-out text that ships with kvfold.",
        metavar="FILE",
    )
    samples: int = option(16, help="Sequences.", least=1)
    seq_len: int = option(512, help="Tokens per sequence.", least=2)
    seed: int = option(0, help="Draws the sequences from the text.", least=0, below=2**63)
    device: Device = option("auto", help="auto: the GPU where there is one.")
    dtype: Dtype = option("auto", help="Dtype to compute in.")
    trust_remote_code: bool = option(False, help="Allow the tokenizer code in MODEL to run.")
    quiet: bool = False


@dataclass(frozen=True, repr=False)
class SweepRequest(Request):
    """A sweep by ``kvfold sweep``: targets of MODEL that are fitted and measured side by side.

    ``targets`` is as the option spells it, or a list; ``out`` is only checked, for ``Sweep.convert`` to write into.
    """

    model: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE)
    targets: str | tuple[str, ...] | None = option(
        None,
        help="gqa:HEADS, mqa, mla:ELEMENTS (the split is chosen) or mla:RANK+ROTARY: gqa:4,2 mqa mla:576,512+64. "
        "Default: a few that suit MODEL.",
        panel="Targets",
        metavar="TARGET...",
    )
    layout: Layout | None = option(None, help=f"Layout of MLA targets (default {DEFAULT_LAYOUT}).", panel="Targets")
    out: str | None = option(
        None, help="Also write the target that is named, to the folder OUT.", panel="Decision", metavar="OUT"
    )
    calibration: str | tuple[str, ...] | None = option(
        None,
        help="Text like that of the model's use, as in `kvfold convert`.",
        panel="Calibration",
        metavar="FILE|DATASET|self",
        check=_texts_rule,
        rule="the name of a text file or dataset",
    )
    samples: int = option(128, help="Calibration sequences.", panel="Calibration", least=1)
    seq_len: int = option(512, help="Tokens per sequence.", panel="Calibration", least=2)
    seed: int = option(0, help="Seed of the sequences drawn.", panel="Calibration", least=0, below=2**63)
    refine: int | Literal["auto"] = option(
        0,
        help="Reconstruction steps per layer of every target.",
        panel="Refinement",
        metavar="STEPS|auto",
        least=0,
        rule="a number of steps or auto",
    )
    device: Device = option("auto", help="auto: the GPU where there is one.", panel="Running")
    dtype: Dtype = option("auto", help="Dtype that OUT would be stored in.", panel="Running")
    quiet: bool = option(False, help="No progress.", panel="Running")
    trust_remote_code: bool = option(False, help="Allow code in the checkpoint to run.", panel="Running")


_NUMBERS = "positive numbers separated by commas, such as 2048,8192"


@dataclass(frozen=True, repr=False)
class EvalRequest(Request):
    """A comparison by ``kvfold eval``: MODEL and OUT on tasks and long contexts."""

    model: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE)
    out: str = option(argument=True, check=_not_blank(_SOURCE), rule=_SOURCE)
    tasks: tuple[str, ...] = option(
        (),
        help="Tasks of lm-evaluation-harness, or FILE.yaml of one; needs the eval extra.",
        metavar="NAME,NAME",
        rule="names of tasks separated by commas",
    )
    limit: int | None = option(None, help="Documents of each task; default: all.", metavar="N", least=1)
    lengths: tuple[int, ...] = option(
        (),
        help="Tokens of long contexts; default: MODEL's context (on a CPU at most 1024), and 1/2, 1/4, 1/8.",
        metavar="N,N",
        rule=_NUMBERS,
    )
    samples: int | None = option(None, help="Documents of each length; default: 32, on a CPU 16.", least=2)
    text: str | None = option(
        None, help="Text to hide words in; default: held-out text that ships with kvfold.", metavar="FILE"
    )
    retrieval: bool = option(True, help="Only the loss by position, and --tasks.")
    batch: int = option(1, help="Documents of a task at once.", least=1)
    seed: int = option(0, help="Of what is drawn.", least=0)
    device: Device = option("auto", help="auto: the GPU where there is one.")
    dtype: Dtype = option("auto", help="Dtype to compute in.")
    quiet: bool = option(False, help="No progress.")
    trust_remote_code: bool = option(False, help="Allow code in the checkpoints to run.")


@dataclass(frozen=True, repr=False)
class BenchRequest(Request):
    """A benchmark by ``kvfold bench``: every model at every context and batch. ``seconds`` of each are timed."""

    models: tuple[str, ...] = option((), argument=True, metavar="[MODEL]...", rule="names of models")
    contexts: tuple[int, ...] = option((2048,), help="Tokens in the cache.", metavar="N,N", rule=_NUMBERS)
    batches: tuple[int, ...] = option((1,), help="Sequences decoded at once.", metavar="N,N", rule=_NUMBERS)
    shape: str | None = option(
        None, help="Random weights in a known shape, every attention kind: llama-2-7b, ...", metavar="NAME"
    )
    layers: int | None = option(None, help="Layers of --shape.", metavar="N", least=1)
    device: Device = option("auto", help="auto: the GPU where there is one.")
    dtype: Dtype = option("auto", help="Dtype to compute in.")
    cache: Literal["dynamic", "static"] = option("dynamic", help="Kind of KV cache.")
    prefill_tokens: int | None = option(
        None, help="Tokens to prefill at most; 0 skips the prefill.", metavar="N", least=0
    )
    threads: int | None = option(None, help="CPU threads; default: torch's choice.", metavar="N", least=1)
    seconds: float = 4.0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.layers is not None and self.shape is None:
            yield "layers", f"{opt('layers')} needs {opt('shape')}; a checkpoint has its own number of layers"
        if not self.models and self.shape is None:
            yield "models", f"name at least one MODEL, or a {opt('shape')} such as llama-2-7b"
