"""``principal`` for GQA and MQA: shared heads are principal components over calibration text."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import DEFAULT, DEFAULT_OBJECTIVE, Fitted, FoldLayer, method, objective

if TYPE_CHECKING:
    from kvfold.convert.transforms.fold.grouping import ChosenPartition
    from kvfold.convert.transforms.fold.heads import Objective
    from kvfold.convert.transforms.weights import LayerStatistics


@objective(DEFAULT_OBJECTIVE)
def scores() -> "Objective":
    """The squared error of attention scores over the distances that count, and of the layer's output per value."""
    from kvfold.convert.transforms.fold.score_fit import SCORES

    return SCORES


@method(
    DEFAULT,
    targets=("gqa", "mqa"),
    reads_text=True,
    needs_linear_keys=True,
    takes_objective=True,
    card="Shared keys and values are principal components over text; queries and the output absorb the change",
)
def principal(layer: FoldLayer) -> Fitted:
    """The fold with the smallest error on held-out text: among ways to count tokens, to group heads, and to read norms.

    Noted are the groups, the share of received attention in a token's weight, and how much norms on queries and keys
    vary.
    """
    from kvfold.convert.transforms.head_norms import norms_note
    from kvfold.convert.transforms.sinks import judged

    statistics = layer.known()
    # Sinks: least squares over tokens, or over the attention that they receive as well.
    best, share = judged(statistics, partial(_grouped, layer), lambda choice: choice.errors[choice.groups])
    notes = {"groups": [list(group) for group in best.groups], "received_attention_share": share}
    return Fitted(best.weights, {**notes, **norms_note(layer.weights, statistics)})


def _grouped(layer: FoldLayer, counted: "LayerStatistics") -> "ChosenPartition":
    """The best partition for tokens as ``counted``, and the better of the two ways to read norms for it."""
    from kvfold.convert.transforms.fold import grouping
    from kvfold.convert.transforms.fold.principal import fold, layer_moments

    weights, rotary, context = layer.weights, layer.rotary, layer.context
    if layer.similar:
        # Sweeps fold one layer to several numbers of heads, for which the moments and losses of pairs are the same.
        plain = counted is layer.statistics
        if plain not in layer.shared:
            layer.shared[plain] = grouping.Pairs(layer_moments(weights, counted, rotary, context))
        choice = grouping.similar(layer.shared[plain], layer.kv_heads, layer.error, layer.objective)
    else:
        neighbors = grouping.contiguous(weights.kv_heads, layer.kv_heads)
        folded = fold(weights, counted, rotary, neighbors, context, layer.objective)
        choice = grouping.ChosenPartition(neighbors, folded, {neighbors: layer.error(folded)})
    if counted.normed is not None:
        # A norm's divisor as it is on average: exact for identical heads, where least squares are not.
        other = fold(weights, replace(counted, normed=None), rotary, choice.groups, context, layer.objective)
        if (error := layer.error(other)) < choice.errors[choice.groups]:
            return replace(choice, weights=other, errors={**choice.errors, choice.groups: error})
    return choice
