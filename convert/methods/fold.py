"""The ``principal`` method for GQA and MQA.

Shared heads are principal components of the keys and values that the source's heads compute on
calibration text.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import (
    DEFAULT,
    DEFAULT_OBJECTIVE,
    Fitted,
    FoldLayer,
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


@method(
    DEFAULT,
    targets=("gqa", "mqa"),
    reads_text=True,
    needs_linear_keys=True,
    takes_objective=True,
    card=(
        "Shared keys and values are principal components fitted to text; queries and output weights"
        " absorb the change"
    ),
)
def principal_fold(layer: FoldLayer) -> Fitted:
    """Fold with several token weights, groupings and ways to fold norms; return the fold with the
    least held-out error.

    The notes contain the groups, the share of received attention in a token's weight, and, if
    queries or keys are normalized, the variation of the norms' divisors.
    """
    from kvfold.convert.transforms.head_norms import measure_norms
    from kvfold.convert.transforms.sinks import better_of_two_fits

    statistics = layer.require_statistics()
    # Sinks: least squares over tokens, or also weighted by the attention that they receive.
    best, share = better_of_two_fits(
        statistics, partial(_grouped, layer), lambda choice: choice.errors[choice.groups]
    )
    notes = {"groups": [list(group) for group in best.groups], "received_attention_share": share}
    return Fitted(best.weights, {**notes, **measure_norms(layer.weights, statistics)})


def _grouped(layer: FoldLayer, counted: "LayerStatistics") -> "ChosenPartition":
    """The best partition for the token weights in ``counted``, with the better of two ways to fold
    norms.
    """
    from kvfold.convert.transforms.fold import grouping
    from kvfold.convert.transforms.fold.principal import fold, layer_moments

    weights = layer.weights
    rotary = layer.rotary
    context = layer.context
    if layer.similar:
        # Sweeps fold one layer to several numbers of heads, all of which share the moments and the
        # losses of pairs.
        plain = counted is layer.statistics
        if plain not in layer.shared:
            layer.shared[plain] = grouping.Pairs(layer_moments(weights, counted, rotary, context))
        choice = grouping.similar(layer.shared[plain], layer.kv_heads, layer.error, layer.objective)
    else:
        neighbors = grouping.contiguous(weights.kv_heads, layer.kv_heads)
        folded = fold(weights, counted, rotary, neighbors, context, layer.objective)
        choice = grouping.ChosenPartition(neighbors, folded, {neighbors: layer.error(folded)})
    if counted.normed is not None:
        # Use the average divisor of a norm: exact for identical heads, unlike least squares.
        other = fold(
            weights, replace(counted, normed=None), rotary, choice.groups, context, layer.objective
        )
        if (error := layer.error(other)) < choice.errors[choice.groups]:
            return replace(choice, weights=other, errors={**choice.errors, choice.groups: error})
    return choice
