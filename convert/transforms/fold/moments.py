"""Second moments of a layer, the same for every partition of its heads: computed once, used for every one tried."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvfold.convert.transforms.fold import normed
from kvfold.convert.transforms.fold.heads import GroupMoments
from kvfold.convert.transforms.fold.score_fit import distance_moments
from kvfold.convert.transforms.head_norms import linear_heads
from kvfold.convert.transforms.linalg import among, head_moments, input_moment, joint_moment, output_metric, with_bias
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


@dataclass(frozen=True)
class LayerMoments:
    """A layer and its second moments, all float64, heads in the source's order.

    ``moment [F, F]`` of the inputs with a constant 1 appended (``F = E + 1``). ``keys``, ``queries``: the linear maps
    that projections and norms are on average; ``values [G, D, F]``. ``joint_keys``, ``joint_values [G, D, G, D]``:
    second moments between all heads. ``query_moments [H, D, D]``: those of each head's queries. ``phi [H, D, D]``: the
    distances that count, from `distance_moments`. ``metric [G, D, D]`` of the output. The rotary amplitude is in
    ``joint_keys`` and ``query_moments``: ``amplitude [D]``.
    """

    weights: AttentionWeights
    rotary: Rotary
    moment: Tensor
    keys: normed.Linear
    queries: normed.Linear
    values: Tensor
    joint_keys: Tensor
    joint_values: Tensor
    query_moments: Tensor
    phi: Tensor
    metric: Tensor
    amplitude: Tensor

    @property
    def repeat(self) -> int:
        """Query heads per KV head."""
        return self.weights.heads // self.weights.kv_heads

    def query_heads(self, kv_heads: Sequence[int]) -> list[int]:
        """The query heads that read some KV heads, in their order."""
        return [head * self.repeat + i for head in kv_heads for i in range(self.repeat)]

    def group(self, members: Sequence[int]) -> GroupMoments:
        """The moments of some KV heads and of the queries that read them."""
        chosen, readers = list(members), self.query_heads(members)
        return GroupMoments(
            keys=among(self.joint_keys, chosen),
            queries=self.query_moments[readers],
            values=among(self.joint_values, chosen),
            phi=self.phi[readers],
            metric=self.metric[chosen],
            pairs=self.rotary.dims // 2,
        )


def layer_moments(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, context: int = 0
) -> LayerMoments:
    """All moments, on the device of ``weights``. ``context``: how many positions the result must serve."""
    statistics = statistics.to(weights.q.device)
    moment = input_moment(statistics)
    keys = _linear_keys(weights, statistics, moment)
    queries = normed.linearize(with_bias(weights.q, weights.q_bias), weights.q_norm, moment)
    amplitude = moment.new_ones(weights.head_dim)
    amplitude[: rotary.dims] = rotary.amplitude
    values = with_bias(weights.v, None if weights.o_bias is not None else weights.v_bias)  # else `o_bias` takes it
    return LayerMoments(
        weights=weights,
        rotary=rotary,
        moment=moment,
        keys=keys,
        queries=queries,
        values=values,
        joint_keys=joint_moment(amplitude[:, None] * keys.affine, moment),
        joint_values=joint_moment(values, moment),
        query_moments=head_moments(amplitude[:, None] * queries.affine, moment),
        phi=distance_moments(statistics.profile, context, rotary, weights.head_dim),
        metric=output_metric(weights.o, weights.kv_heads),
        amplitude=amplitude,
    )


def _linear_keys(weights: AttentionWeights, statistics: LayerStatistics, moment: Tensor) -> normed.Linear:
    """Keys as linear maps: of least squares where the statistics know what is behind the norm, else as on average.

    Members of a group then share keys that are divided already, and the norm of the shared head finds less to divide.
    """
    keys = normed.linearize(with_bias(weights.k, weights.k_bias), weights.k_norm, moment)
    norm = weights.k_norm
    if norm is None or norm.bias is not None or statistics.normed is None:
        return keys
    fitted = linear_heads(weights, statistics)
    return replace(keys, rows=with_bias(fitted.k, fitted.k_bias))
