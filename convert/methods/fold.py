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
    method,
    objective,
)

if TYPE_CHECKING:
    from kvfold.convert.transforms.fold.grouping import ChosenPartition
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.weights import LayerStatistics


@objective(DEFAULT_OBJECTIVE)
def scores() -> "Objective":
    """Minimize the squared error of attention scores for shared keys, and of the layer's output for
    shared values.
    """
    from kvfold.convert.transforms.fold.score_fit import SCORES

    return SCORES


@method
class PrincipalFold(Method):
    """Fold with several token weights, groupings and ways to fold norms; return the fold with the
    least held-out error.

    The notes contain the groups, the share of received attention in a token's weight, and, if
    queries or keys are normalized, the variation of the norms' divisors.
    """

    name = DEFAULT
    targets = ("gqa", "mqa")
    reads_text = True
    needs_linear_keys = True
    takes_objective = True
    card = (
        "Shared keys and values are principal components fitted to text; queries and output weights"
        " absorb the change"
    )

    def fit(self, layer: FoldLayer) -> ConvertedLayer:
        from kvfold.convert.transforms.head_norms import measure_norms
        from kvfold.convert.transforms.sinks import token_weightings

        statistics = layer.require_statistics()
        # Sinks: least squares over tokens, or also weighted by the attention that they receive.
        folds = [
            (share, fold_groups(layer, weighted))
            for share, weighted in token_weightings(statistics)
        ]
        share, best = min(folds, key=lambda fold: fold[1].errors[fold[1].groups])
        notes = {
            "groups": [list(group) for group in best.groups],
            "received_attention_share": share,
            **measure_norms(layer.weights, statistics),
        }
        return ConvertedLayer(best.weights, notes)


def fold_groups(layer: FoldLayer, statistics: "LayerStatistics") -> "ChosenPartition":
    """The best partition for the token weights in ``statistics``, with the better of two ways to
    fold norms.
    """
    from kvfold.convert.transforms.fold import grouping
    from kvfold.convert.transforms.fold.principal import fold, layer_moments

    weights = layer.weights
    rotary = layer.rotary
    context = layer.context
    if layer.similar:
        # Sweeps fold one layer to several numbers of heads, all of which share the moments and the
        # losses of pairs.
        unweighted = statistics is layer.statistics
        if unweighted not in layer.shared:
            moments = layer_moments(weights, statistics, rotary, context)
            layer.shared[unweighted] = grouping.Pairs(moments)
        choice = grouping.similar(
            layer.shared[unweighted], layer.kv_heads, layer.error, layer.objective
        )
    else:
        neighbors = grouping.contiguous(weights.kv_heads, layer.kv_heads)
        folded = fold(weights, statistics, rotary, neighbors, context, layer.objective)
        choice = grouping.ChosenPartition(neighbors, folded, {neighbors: layer.error(folded)})
    if statistics.normed is None:
        return choice
    # Use the average divisor of a norm: exact for identical heads, unlike least squares.
    averaged = replace(statistics, normed=None)
    folded = fold(weights, averaged, rotary, choice.groups, context, layer.objective)
    error = layer.error(folded)
    if error >= choice.errors[choice.groups]:
        return choice
    return replace(choice, weights=folded, errors={**choice.errors, choice.groups: error})
