"""Folds from weights alone: mean, first, random."""

from collections.abc import Iterator

from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.method import Converted, Method
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.source import source_layer
from kvfold.convert.transforms.fold import pool
from kvfold.convert.transforms.weights import AttentionWeights


class Pooled(Method):
    """Key/value heads pooled within contiguous groups; no text is read."""

    def layers(self, journal: Journal) -> Iterator[Converted]:
        for layer in journal.pending:
            folded = pooled_layer(self.plan, layer)
            yield Converted(layer, self.plan.layout.encode(layer, folded), {})


def pooled_layer(plan: Plan, layer: int) -> AttentionWeights:
    """``layer`` with its heads pooled. Raises InputError when a weight is not finite."""
    weights, kv_heads = source_layer(plan, layer), plan.kv_heads
    match plan.request.resolved_method:
        case "first":
            return pool.first(weights, kv_heads)
        case "random":
            std = plan.geometry.initializer_range
            return pool.random(weights, kv_heads, seed=plan.request.seed, layer=layer, std=std)
        case _:
            return pool.mean(weights, kv_heads)
