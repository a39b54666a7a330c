"""What ``kvfold.json`` says of norms on queries and keys."""

from kvfold.convert.conversion.method import Notes
from kvfold.convert.transforms.head_norms import linear_heads, norm_fit
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics

NORMS = "head_norms"


def norms_note(weights: AttentionWeights, statistics: LayerStatistics, *, key_constant: bool = False) -> Notes:
    """The note of a layer: how much divisors vary, and what linear maps miss; none for a layer without such norms."""
    linear = linear_heads(weights, statistics, key_constant=key_constant)
    fit = norm_fit(weights, linear, statistics)
    return {} if fit is None else {NORMS: fit.record()}
