"""Sizes of caches, and the targets that a model can become."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvfold.convert.checkpoint.headers import DTYPE_BITS
from kvfold.convert.conversion.plan import possible_kv_heads
from kvfold.convert.families.model import Model
from kvfold.convert.request import DEFAULT_LAYOUT
from kvfold.convert.targets.engines import (
    Result,
    Verdict,
    alternatives,
    folded_result,
    latent_options,
    latent_result_of,
    proposals,
    verdicts,
)
from kvfold.convert.targets.mla.config import KERNEL_CACHES, LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems, model_problems
from kvfold.convert.targets.own_code import needs_own_code
from kvfold.convert.targets.same_family import cache_elements

CONTEXTS = {"8k": 8192, "128k": 131072}
# Divisors of the present cache that are offered as MLA budgets.
_PARTS = (4, 8)


@dataclass(frozen=True)
class CacheSize:
    """The KV cache of one sequence: elements per token per layer, bytes per token, bytes at each of ``CONTEXTS``.

    A layer with a window never holds more than its window. ``per_rank``: elements per token per layer on each of so
    many tensor-parallel ranks.
    """

    numbers_per_token_and_layer: int
    bytes_per_token: int
    bytes: Mapping[str, int]
    per_rank: Mapping[str, int]


@dataclass(frozen=True)
class TargetSize(CacheSize):
    """The cache of a target, the ``options`` of ``kvfold convert`` that make it, and the part of the cache it saves.

    ``engines``: the verdict of each engine.
    """

    options: str
    saves: float
    engines: list[Verdict]

    @property
    def served_by(self) -> str:
        """The engines that serve the target, in words; with an asterisk where no run showed it."""
        return ", ".join(each.engine + ("" if each.ran else "*") for each in self.engines if each.serves)


def cache_size(result: Result, windows: list[int | None], dtype: str) -> CacheSize:
    """The cache of ``result``; ``windows``: of each layer."""
    elements = result.elements()
    width = elements * DTYPE_BITS[dtype] // 8
    held = {
        name: width * sum(min(context, window or context) for window in windows) for name, context in CONTEXTS.items()
    }
    return CacheSize(elements, len(windows) * width, held, result.per_rank())


def target_sizes(model: Model, windows: list[int | None], dtype: str) -> list[TargetSize]:
    """Every target that is offered: folds, splits that MLA kernels take, other parts of the present cache."""
    present, own = cache_elements(model.geometry), needs_own_code(model)
    targets = {
        "--to mqa" if kv_heads == 1 else f"--to gqa --kv-heads {kv_heads}": folded_result(model, kv_heads)
        for kv_heads in possible_kv_heads(model.geometry)
    }
    if own or not model_problems(model):
        # Of the layouts of a split the first: most engines serve it.
        best: dict[int, LatentTarget] = {}
        for target in proposals(model):
            best.setdefault(target.kv_rank, target)
        targets |= {latent_options(target): latent_result_of(model, target) for target in best.values()}
        layout, rope = "kvfold" if own else DEFAULT_LAYOUT, 2 if model.geometry.rotary_dims else 0
        for budget in (present // part for part in _PARTS):
            # Engines look at the sum of a split, so the shares within a budget do not matter here.
            if budget >= 4 and budget not in KERNEL_CACHES:
                split = LatentTarget(budget - rope, rope, layout=layout)
                targets[f"--to mla --budget {budget}"] = latent_result_of(model, split)
    others, sizes = alternatives(model), []
    for options, result in targets.items():
        # The nearest alternative is the same target in layout engine, if the model can have that.
        near = result.kind == "free" and not latent_problems(model, LatentTarget(*result.split, layout="engine"))
        instead = {f"{options} --layout engine": replace(result, kind="engine")} if near else {}
        size, saves = cache_size(result, windows, dtype), 1 - result.elements() / present
        answers = verdicts(result, instead | others)
        sizes.append(TargetSize(**vars(size), options=options, saves=saves, engines=answers))
    return sizes
