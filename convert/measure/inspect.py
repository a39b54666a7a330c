"""``kvfold inspect``: describe a checkpoint from its config and headers, without importing torch or
transformers.
"""

import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.folder import RECORD, json_beside
from kvfold.convert.checkpoint.headers import DTYPE_BITS
from kvfold.convert.checkpoint.opening import Checkpoint, open_headers
from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import (
    names_in_files,
    read_architectures,
    text_config,
    text_type,
)
from kvfold.convert.families.model import Model, model_of
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.measure.converted import converted_model, latent_faults
from kvfold.convert.sizes import bytes_text, table
from kvfold.convert.targets.engines import (
    RANKS,
    ServedModel,
    Support,
    describe_fold,
    describe_latent_config,
    describe_mla,
    format_mla_options,
    propose_alternatives,
    propose_budgets,
    propose_kernel_splits,
    support_for,
)
from kvfold.convert.targets.mla.problems import latent_problems, model_problems
from kvfold.convert.targets.mla.spec import MlaSpec, is_latent
from kvfold.convert.targets.own_code import needs_own_code, source_type
from kvfold.convert.targets.same_family import attention_label, cache_elements

CONTEXTS = {"8k": 8192, "128k": 131072}
# The least, mean and greatest of the layers.
Range = tuple[float, float, float]

_NORM_FACTS = ("query_spread", "key_spread", "query_missed", "key_missed")


@dataclass(frozen=True)
class CacheSize:
    """The KV-cache size for one sequence; a sliding-window layer caches at most its window.

    ``bytes`` are by context, ``per_rank`` the elements per token per layer by the number of
    tensor-parallel ranks.
    """

    cache_elements: int
    bytes_per_token: int
    bytes: Mapping[str, int]
    per_rank: Mapping[str, int]


@dataclass(frozen=True)
class TargetSize(CacheSize):
    """A target's cache, its ``options`` for ``kvfold convert``, the share of cache saved, and
    engines' support.
    """

    options: str
    saves: float
    engines: list[Support]

    @property
    def served_by(self) -> str:
        """The engines that serve the target, separated by commas; an asterisk marks an engine that
        was not run.
        """
        return ", ".join(
            each.engine + ("" if each.ran else "*") for each in self.engines if each.serves
        )


@dataclass(frozen=True)
class LatentLimits:
    """The limits for a conversion to MLA, or the reasons why it is impossible, in ``because``."""

    possible: bool
    because: list[str] = field(default_factory=list)
    numbers_below: int | None = None
    rope_dim_up_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint's attention, weights and cache, and the targets to which it can be converted.

    Only MLA models have ``value_dim``, ``kv_rank`` and ``q_rank``. MLA models and layout ``kvfold``
    have no ``targets`` and no ``latent``; ``engines`` says which engines serve them. ``windows``
    lists the distinct window sizes. ``head_norms``, from ``kvfold.json``, describes norms on
    queries and keys: how much their divisors vary, and the share of energy lost by replacing them
    with linear maps.
    """

    model: str
    family: str
    architecture: str
    attention: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    model_dim: int
    kv_rank: int | None = None
    q_rank: int | None = None
    biases: list[str]
    qk_norm: str | None
    rotary_dims: int
    rotary_layers: int
    rope: str
    windows: list[int]
    max_context: int | None
    dtype: str
    parameters: int
    weight_bytes: int
    files: int
    cache: CacheSize
    engines: list[Support]
    targets: list[TargetSize]
    latent: LatentLimits | None
    head_norms: dict[str, Range] | None = None

    def __repr__(self) -> str:
        elements = f"{self.cache.cache_elements} KV-cache elements per token per layer"
        return (
            f"Inspection({self.model!r}: {self.family}, {self.attention}, {self.layers} layers,"
            f" {elements})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as ``kvfold inspect --json`` prints them."""
        values = asdict(self) | {
            "targets": [{"options": target.options, **asdict(target)} for target in self.targets],
            "latent": (
                self.latent
                and {k: v for k, v in asdict(self.latent).items() if v not in (None, [])}
            ),
        }
        left_out = {"value_dim", "kv_rank", "q_rank"} if self.attention != "MLA" else set()
        left_out |= {"head_norms"} if self.head_norms is None else set()
        return {name: value for name, value in values.items() if name not in left_out}

    def summary(self) -> str:
        """The facts, then the targets, as text for the terminal."""
        facts = table(list(self._facts().items()), left=(0, 1))
        return "\n".join([self.model, *(f"  {line}" for line in facts), "", *self._target_lines()])

    def _facts(self) -> dict[str, str]:
        heads = (
            f"{self.heads} query heads, {self.kv_heads} key/value heads, head dim {self.head_dim}"
        )
        if self.attention == "MLA":
            heads = (
                f"{self.heads} heads over a latent of {self.kv_rank} and a rotary key of"
                f" {self.rotary_dims}"
            )
        extras = [f"biases on {', '.join(self.biases)}"] if self.biases else ["no biases"]
        extras += [f"{self.qk_norm} norm on queries and keys"] if self.qk_norm else []
        rotary = (
            f"{self.rotary_dims} of {self.head_dim} dims, {self.rope}"
            if self.rotary_dims
            else "none"
        )
        if self.rotary_dims and self.rotary_layers < self.layers:
            rotary += f", in {self.rotary_layers} of {self.layers} layers"
        large = self.parameters >= 10**9
        parameters = f"{self.parameters / 1e9:.2f} B" if large else f"{self.parameters / 1e6:.1f} M"
        cache = self.cache
        files = f"{self.files} file{'s' if self.files > 1 else ''}"
        held = ", ".join(
            f"{bytes_text(size)} at {context}" for context, size in cache.bytes.items()
        )
        rows = {
            "family": f"{self.family} ({self.architecture})",
            "attention": f"{self.attention}: {heads}",
            "layers": f"{self.layers}, model dim {self.model_dim}, {', '.join(extras)}",
            "rotary": rotary,
            **({"windows": ", ".join(map(str, self.windows))} if self.windows else {}),
            "weights": (
                f"{parameters} parameters, {bytes_text(self.weight_bytes)} of {self.dtype} in"
                f" {files}"
            ),
            "KV cache": (
                f"{cache.cache_elements} elements per token per layer, "
                f"{bytes_text(cache.bytes_per_token)} per token ({held})"
            ),
        }
        if self.head_norms:
            shown = {
                name: f"{100 * least:.1f} to {100 * most:.1f} % (mean over layers {100 * mean:.1f})"
                for name, (least, mean, most) in self.head_norms.items()
            }
            spread = f"{shown['query_spread']} for queries, {shown['key_spread']} for keys"
            missed = f"{shown['query_missed']} of the queries, {shown['key_missed']} of the keys"
            rows |= {
                "norms": f"divisors varied over the text by {spread}",
                "norms lost": f"linear maps lose {missed}",
            }
        return rows | {
            verdict.engine: verdict.to_text().split(": ", 1)[1] for verdict in self.engines
        }

    def _target_lines(self) -> list[str]:
        """Lines with a table of the targets, notes, and the reason for each engine that does not
        serve a target.
        """
        if not self.targets:
            return ["can become: nothing smaller"]
        rows = [
            (
                "can become",
                "saves",
                "per token",
                *(f"at {context}" for context in CONTEXTS),
                "served by",
            )
        ]
        for target in self.targets:
            sizes = map(bytes_text, (target.bytes_per_token, *target.bytes.values()))
            rows.append((target.options, f"{100 * target.saves:.1f} %", *sizes, target.served_by))
        lines = table(rows, (24, 7, 10, 10, 10), left=(0, len(rows[0]) - 1))
        lines += [f"not MLA: {reason}" for reason in (self.latent.because if self.latent else ())]
        if self.qk_norm and any("--to mla" in target.options for target in self.targets):
            lines += [
                (
                    "MLA replaces the norms on queries and keys with linear maps. The loss depends"
                    " on how much the norms' divisors vary,"
                ),
                (
                    "which headers do not show; a conversion measures it on text (`head_norms` in"
                    " kvfold.json)"
                ),
            ]
        if any("*" in target.served_by for target in self.targets):
            lines.append("* according to the engine's source code; not run")
        # Elements on each tensor-parallel rank: heads are shared out, a latent is whole on every
        # rank.
        ranks = list(self.cache.per_rank)
        if len(ranks) == 1:
            numbers = f"neither {', '.join(map(str, RANKS[1:-1]))} nor {RANKS[-1]}"
            heads = f"{self.heads} query and {self.kv_heads} key/value heads"
            lines += ["", f"tensor parallelism: {numbers} ranks divide {heads}"]
        else:
            note = "(tensor parallelism: each rank stores the whole latent)"
            caches = {"now": self.cache, **{target.options: target for target in self.targets}}
            counts = [
                (name, *(f"{size.per_rank.get(n, '-')}" for n in ranks), "")
                for name, size in caches.items()
            ]
            titles = ("elements on each of N ranks", *(f"N = {n}" for n in ranks), note)
            lines += [
                "",
                *table(
                    [titles, *counts],
                    (len(rows[0][0]), *[7] * len(ranks)),
                    left=(0, len(ranks) + 1),
                ),
            ]
        refused: dict[str, str] = {}
        for target in self.targets:
            for verdict in target.engines:
                # The reasons of an engine are nearly the same for all targets: the first one is
                # enough.
                if not verdict.serves:
                    refused.setdefault(verdict.engine, f"{target.options}: {verdict.to_text()}")
        lines += ["", *refused.values()] if refused else []
        return [f"  {line}".rstrip() for line in lines]


def inspect_checkpoint(model: str | os.PathLike[str]) -> Inspection:
    """Describe ``model``, a folder or hub id, from its config and headers. Cache sizes are for one
    sequence.

    >>> facts = inspect_checkpoint(demo_folder())
    >>> facts
    Inspection('demo': llama, MHA, 4 layers, 512 KV-cache elements per token per layer)
    >>> [target.options for target in facts.targets][:2]
    ['--to gqa --kv-heads 4', '--to gqa --kv-heads 2']

    Raises InputError if the checkpoint does not exist, its files are damaged, or its family is not
    supported.
    """
    with closing(open_headers(model)) as checkpoint:
        config = checkpoint.config
        # A wrapper's language model may be latent.
        language = config if text_type(config) is None else text_config(config, checkpoint.tensors)
        if is_latent(language) or source_type(config) is not None:
            latent = is_latent(language)
            read = _latent_facts(checkpoint, language) if latent else _converted_facts(checkpoint)
            facts, result, windows, tried = read
            cache = cache_size(result, windows, facts["dtype"])
            engines = support_for(result) if tried else []
            found = Inspection(**facts, cache=cache, engines=engines, targets=[], latent=None)
        else:
            found = _inspect_source(checkpoint)
        return replace(found, head_norms=norm_ranges(checkpoint.folder))


def _inspect_source(checkpoint: Checkpoint) -> Inspection:

    model = model_of(checkpoint.config, checkpoint.tensors)
    if problems := model.tensor_problems(checkpoint.tensors):
        raise InputError(f"{checkpoint.origin}: its tensors do not match its config.json", problems)
    facts = _model_facts(model, checkpoint)
    windows = [layer.window for layer in model.layers]
    geometry = model.geometry
    refusals = [] if needs_own_code(model) else model_problems(model)
    limits = LatentLimits(
        True, [], cache_elements(geometry), geometry.rotary_dims * geometry.kv_heads
    )
    return Inspection(
        **facts,
        cache=cache_size(describe_fold(model), windows, facts["dtype"]),
        engines=[],
        targets=target_sizes(model, windows, facts["dtype"]),
        latent=LatentLimits(False, list(refusals)) if refusals else limits,
    )


# Fields of an `Inspection`, the result, the window of each layer, and True if engines were tested
# on its kind.
_Facts = tuple[dict[str, Any], ServedModel, list[int | None], bool]


def _converted_facts(checkpoint: Checkpoint) -> _Facts:
    """The facts of a result in layout ``kvfold``."""
    source, result = converted_model(checkpoint)
    facts = _model_facts(source, checkpoint)
    facts |= {"family": checkpoint.config["model_type"], **_file_facts(checkpoint)}
    if sum(result.split):
        rank, rope = result.split
        facts |= {"attention": "MLA", "kv_rank": rank, "rotary_dims": rope}
        facts |= {"value_dim": facts["head_dim"], "head_dim": facts["head_dim"] + rope}
    else:
        label = attention_label(source.geometry.heads, result.kv_heads)
        facts |= {"attention": label[:3], "kv_heads": result.kv_heads}
    return facts, result, [layer.window for layer in source.layers], True


def _latent_facts(checkpoint: Checkpoint, config: Mapping[str, Any]) -> _Facts:
    """The facts of a model in a stock MLA class, which has no windows.

    ``config`` is that of the language model, which may be inside a wrapper.
    """
    wrapped = names_in_files(checkpoint.tensors).wrapped if config is not checkpoint.config else str
    if problems := latent_faults(config, checkpoint.tensors, wrapped):
        raise InputError(f"{checkpoint.origin}: {problems[0]}", problems[1:])
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    rope = config["qk_rope_head_dim"]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    facts = {
        "family": checkpoint.config["model_type"],
        "attention": "MLA",
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": config["qk_nope_head_dim"] + rope,
        "value_dim": config["v_head_dim"],
        "model_dim": config["hidden_size"],
        "kv_rank": config["kv_lora_rank"],
        "q_rank": config.get("q_lora_rank"),
        "biases": ["kv_a", "o"] if config.get("attention_bias") else [],
        "qk_norm": None,
        "rotary_dims": rope,
        "rotary_layers": layers,
        "rope": rotary.get("rope_type") or rotary.get("type") or "default",
        "windows": [],
        "max_context": config.get("max_position_embeddings"),
        **_file_facts(checkpoint),
    }
    # Engines were tried on latent models as kvfold writes them, which these classes can also hold
    # otherwise: they drop the biases and the scaled RoPE of a DeepSeek model silently.
    plain = rotary.get("factor", 1.0) == 1.0 and facts["rope"] in ("default", "yarn")
    tried = {
        "youtu": config.get("attention_bias"),
        "deepseek_v3": (
            config.get("first_k_dense_replace") == layers
            and plain
            and not config.get("attention_bias")
        ),
        "mistral4": (config.get("rope_parameters") or {}).get("llama_4_scaling_beta") == 0,
    }.get(config["model_type"])
    return facts, describe_latent_config(checkpoint.config), [None] * layers, bool(tried)


def _model_facts(model: Model, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of an ``Inspection`` that are determined by family, config and tensors."""
    family = model.family
    geometry = model.geometry
    layers = model.layers
    return {
        "family": family.model_type,
        "attention": attention_label(geometry.heads, geometry.kv_heads)[:3],
        "layers": geometry.layers,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "model_dim": geometry.model_dim,
        "biases": list(model.biased),
        "qk_norm": model.qk_norm.kind if model.qk_norm else None,
        "rotary_dims": geometry.rotary_dims,
        "rotary_layers": sum(layer.rotates for layer in layers),
        "rope": (
            rope_table(model.values, layers[0].type)["rope_type"]
            if geometry.rotary_dims
            else "none"
        ),
        "windows": sorted({layer.window for layer in layers if layer.window is not None}),
        "max_context": geometry.positions,
        **_file_facts(checkpoint, family.architecture),
    }


def _file_facts(checkpoint: Checkpoint, architecture: str = "unknown") -> dict[str, Any]:
    """The fields that need no family. The dtype is the most common one; cache sizes assume it too."""
    infos = checkpoint.tensors.values()
    sizes = checkpoint.float_bytes()
    return {
        "model": checkpoint.origin,
        "architecture": (read_architectures(checkpoint.config) or [architecture])[0],
        "dtype": max(sizes, key=sizes.__getitem__, default="F32"),
        "parameters": sum(math.prod(info.shape) for info in infos),
        "weight_bytes": sum(info.nbytes for info in infos),
        "files": len({info.file for info in infos}),
    }


def norm_ranges(folder: Path) -> dict[str, Range] | None:
    """The range over layers of each ``head_norms`` value in ``kvfold.json``; None if the file has
    no such values.
    """
    recorded = json_beside(folder, RECORD).get("head_norms")
    columns: dict[str, list[float]] = {name: [] for name in _NORM_FACTS}
    for layer in recorded if isinstance(recorded, list) else []:
        values = [layer.get(name) for name in _NORM_FACTS] if isinstance(layer, dict) else []
        # Inspecting a checkpoint must not fail because of a damaged record.
        found = [value for value in values if isinstance(value, float) and math.isfinite(value)]
        if len(found) == len(_NORM_FACTS):
            for column, value in zip(columns.values(), found, strict=True):
                column.append(value)
    if not all(columns.values()):
        return None
    return {
        name: (min(values), sum(values) / len(values), max(values))
        for name, values in columns.items()
    }


def cache_size(result: ServedModel, windows: list[int | None], dtype: str) -> CacheSize:
    """The cache size of ``result``; ``windows`` has one entry per layer, None for full attention."""
    elements = result.cache_elements()
    width = elements * DTYPE_BITS[dtype] // 8
    held = {
        name: width * sum(min(context, window or context) for window in windows)
        for name, context in CONTEXTS.items()
    }
    return CacheSize(elements, len(windows) * width, held, result.per_rank())


def target_sizes(model: Model, windows: list[int | None], dtype: str) -> list[TargetSize]:
    """All proposed targets: GQA, MQA, MLA splits supported by kernels, and `propose_budgets`."""
    present = cache_elements(model.geometry)
    targets = {
        "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}": describe_fold(
            model, kv_heads
        )
        for kv_heads in possible_kv_heads(model.geometry)
    }
    # Of the layouts of a split the first: most engines serve it.
    best: dict[int, MlaSpec] = {}
    for target in propose_kernel_splits(model):
        best.setdefault(target.kv_rank, target)
    targets |= {format_mla_options(target): describe_mla(model, target) for target in best.values()}
    for target in propose_budgets(model):
        # Engines look at the sum of a split, so the shares within a budget do not matter here.
        targets[f"--to mla --budget {target.kv_rank + target.rope_dim}"] = describe_mla(
            model, target
        )
    others = propose_alternatives(model)
    sizes = []
    for options, result in targets.items():
        # The nearest alternative is the same target in layout engine, if the model can have that.
        near = result.kind == "free" and not latent_problems(
            model, MlaSpec(*result.split, layout="engine")
        )
        instead = {f"{options} --layout engine": replace(result, kind="engine")} if near else {}
        size = cache_size(result, windows, dtype)
        saves = 1 - result.cache_elements() / present
        answers = support_for(result, instead | others)
        sizes.append(TargetSize(**vars(size), options=options, saves=saves, engines=answers))
    return sizes
