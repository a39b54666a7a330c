"""``principal`` for MLA: a joint latent of keys and values, fitted to calibration text."""

from functools import partial
from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import DEFAULT, Fitted, LatentLayer, method

if TYPE_CHECKING:
    from kvfold.convert.transforms.latent.weights import LatentWeights
    from kvfold.convert.transforms.weights import LayerStatistics


@method(
    DEFAULT,
    targets=("mla",),
    reads_text=True,
    card="Shared keys and values are principal components over text; queries and the output absorb the change",
)
def principal(layer: LatentLayer) -> Fitted:
    """The latent with the smallest error on held-out text: among ways to count tokens, with and without a damper.

    Noted are the share of received attention in a token's weight, the dampers of a live norm, and what linear maps miss
    of norms on queries and keys where these do not stay.
    """
    from kvfold.convert.transforms.head_norms import norms_note
    from kvfold.convert.transforms.sinks import judged

    statistics = layer.known()
    # Sinks: least squares over tokens, or over the attention that they receive as well.
    (latent, dampers), share = judged(statistics, partial(_normalized, layer), lambda option: layer.error(option[0]))
    notes = {"received_attention_share": share, **({} if layer.centered else {"damper_channels": dampers})}
    if not layer.keeps_norms:
        notes |= norms_note(layer.weights, statistics, key_constant=layer.centered)
    return Fitted(latent, notes)


def _normalized(layer: LatentLayer, counted: "LayerStatistics") -> "tuple[LatentWeights, int]":
    """The latent for tokens as ``counted``, in coordinates for a live norm where the layout has one; its dampers."""
    from kvfold.convert.transforms.latent.variants import live_norm
    from kvfold.convert.transforms.sinks import with_damper

    if layer.centered:
        return fit_latent(layer, counted, layer.channels), 0
    plain = live_norm(fit_latent(layer, counted, layer.channels), layer.inputs)
    # Where received attention does not count there are no sinks, and nothing to damp.
    if counted is layer.statistics or layer.channels < 2:
        return plain, 0
    damped = with_damper(fit_latent(layer, counted, layer.channels - 1), layer.known())
    return min((plain, 0), (live_norm(damped, layer.inputs), 1), key=lambda option: layer.error(option[0]))


def fit_latent(layer: LatentLayer, statistics: "LayerStatistics", channels: int) -> "LatentWeights":
    """``layer`` as latent attention of ``channels`` channels, before any norm of the latent.

    Norms on queries and keys stay where the layout has a place for them; else linear maps stand in.
    """
    from kvfold.convert.transforms.head_norms import linear_heads
    from kvfold.convert.transforms.latent.latent import to_latent
    from kvfold.convert.transforms.latent.variants import query_latent

    weights, centered = layer.weights, layer.centered
    if not layer.keeps_norms:
        weights = linear_heads(weights, statistics, key_constant=centered)
    place = layer.rotary, layer.slots, channels
    latent = to_latent(weights, statistics, *place, context=layer.context, scale=layer.scale, centered=centered)
    return latent if layer.query_channels is None else query_latent(latent, statistics, layer.query_channels)
