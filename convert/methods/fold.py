"""The ``principal`` method for GQA and MQA.

Shared heads are principal components of the keys and values that the source's heads compute on
calibration text.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import (
    DEFAULT,
    DEFAULT_OBJECTIVE,
    ConvertedLayer,
    FoldLayer,
    Method,
    register_method,
    register_objective,
)

if TYPE_CHECKING:
    from kvfold.convert.transforms.fold.grouping import Partition
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics

# The most heads for which groups are searched for each weighting of the tokens: pairs of heads grow
# with the square. Groups searched for one weighting alone, KL / excess loss of the reference MHA
# model: 8 -> 4 heads 0.0127 / 0.0155 -> 0.0136 / 0.0155, 8 -> 2 heads equal (2026-11-28).
_SEARCHED_HEADS = 16


@register_objective(DEFAULT_OBJECTIVE)
def make_score_objective() -> "Objective":
    """Return the default objective: shared keys minimize the squared error of attention scores,
    shared values that of the layer's output.
    """
    from kvfold.convert.transforms.fold.heads import SCORES

    return SCORES


@register_method
class PrincipalFold(Method):
    """The method ``principal`` for GQA and MQA: folds heads with several token weights, groupings
    and ways to fold norms, and keeps the fold with the least held-out error.

    The notes contain the groups.
    """

    name = DEFAULT
    targets = ("gqa", "mqa")
    reads_text = True
    needs_linear_keys = True
    card = (
        "Shared keys and values are principal components fitted to text; queries and output weights"
        " absorb the change"
    )

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        """Return the layer with folded key/value heads, and the chosen groups of heads as notes."""
        # Sinks: least squares over tokens, or also weighted by the attention that they receive.
        folds: list[tuple[float, Partition, AttentionWeights]] = []
        for weighted in layer.require_statistics().list_token_weightings():
            known = folds[0][1] if folds and layer.weights.kv_heads > _SEARCHED_HEADS else None
            folds.append(fold_with_best_groups(layer, weighted, known))
        _, groups, weights = min(folds, key=lambda fold: fold[0])
        return ConvertedLayer(weights, {"groups": [list(group) for group in groups]})


def fold_with_best_groups(
    layer: FoldLayer, statistics: "LayerStatistics", known: "Partition | None" = None
) -> "tuple[float, Partition, AttentionWeights]":
    """Fold a layer with several groupings of heads; return the least held-out error, its groups and
    the folded weights.

    Tried are the groups ``known`` or, if it is None, several groupings, and for the best of them
    another way to fold norms.
    """
    from kvfold.convert.transforms.fold.grouping import (
        PairLosses,
        group_neighbors,
        propose_partitions,
    )
    from kvfold.convert.transforms.fold.principal import compute_layer_moments, fold_heads

    # Sweeps fold one layer to several numbers of heads, all of which share the moments and the
    # losses of pairs.
    unweighted = statistics is layer.statistics
    if unweighted not in layer.pair_losses_cache:
        layer.pair_losses_cache[unweighted] = PairLosses(
            compute_layer_moments(layer.weights, statistics, layer.rotary, layer.context)
        )
    pairs = layer.pair_losses_cache[unweighted]
    if known is not None:
        partitions = [known]
    elif layer.similar:
        partitions = propose_partitions(pairs, layer.kv_heads)
    else:
        partitions = [group_neighbors(layer.weights.kv_heads, layer.kv_heads)]
    moments = pairs.head_moments if len(partitions) > 1 else None
    folds = []
    for groups in partitions:
        weights = fold_heads(pairs.layer_moments, groups, layer.objective, moments)
        folds.append((layer.measure_error(weights), groups, weights))
    error, groups, weights = min(folds, key=lambda fold: fold[0])
    if statistics.normed is None:
        return error, groups, weights
    # Use the average divisor of a norm: exact for identical heads, unlike least squares.
    averaged = replace(statistics, normed=None)
    averaged_moments = compute_layer_moments(layer.weights, averaged, layer.rotary, layer.context)
    other = fold_heads(averaged_moments, groups, layer.objective)
    other_error = layer.measure_error(other)
    if other_error < error:
        return other_error, groups, other
    return error, groups, weights
