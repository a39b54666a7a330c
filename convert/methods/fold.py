"""``principal`` for GQA and MQA: shared heads are principal components over calibration text."""

from dataclasses import replace
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
    from kvfold.convert.transforms.fold import grouping
    from kvfold.convert.transforms.fold.principal import fold, layer_moments
    from kvfold.convert.transforms.head_norms import norms_note
    from kvfold.convert.transforms.sinks import judged

    weights, statistics, rotary, context = layer.weights, layer.known(), layer.rotary, layer.context
    neighbors = grouping.contiguous(weights.kv_heads, layer.kv_heads)

    def fitted(counted: "LayerStatistics") -> "ChosenPartition":
        if layer.similar:
            alike = counted is statistics
            if alike not in layer.shared:
                layer.shared[alike] = grouping.Pairs(layer_moments(weights, counted, rotary, context))
            choice = grouping.similar(layer.shared[alike], layer.kv_heads, layer.error, layer.objective)
        else:
            folded = fold(weights, counted, rotary, neighbors, context, layer.objective)
            choice = grouping.ChosenPartition(neighbors, folded, {neighbors: layer.error(folded)})
        if counted.normed is None:
            return choice
        # A norm's divisor as it is on average: exact for identical heads, where least squares are not.
        other = fold(weights, replace(counted, normed=None), rotary, choice.groups, context, layer.objective)
        error = layer.error(other)
        if error >= choice.errors[choice.groups]:
            return choice
        return replace(choice, weights=other, errors={**choice.errors, choice.groups: error})

    best, share = judged(statistics, fitted, lambda choice: choice.errors[choice.groups])
    groups = [list(group) for group in best.groups]
    return Fitted(
        best.weights, {"groups": groups, "received_attention_share": share, **norms_note(weights, statistics)}
    )
