"""The ``principal`` method for MLA: a joint latent for keys and values, fitted to calibration text."""

from functools import partial
from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import DEFAULT, Fitted, LatentLayer, method

if TYPE_CHECKING:
    from kvfold.convert.transforms.latent.latent_weights import LatentWeights
    from kvfold.convert.transforms.weights import LayerStatistics


@method(
    DEFAULT,
    targets=("mla",),
    reads_text=True,
    card=(
        "Shared keys and values are principal components fitted to text; queries and output weights"
        " absorb the change"
    ),
)
def principal_latent(layer: LatentLayer) -> Fitted:
    """Fit a latent with and without extra weight on attention sinks, and with and without a damper;
    return the best.

    Held-out text decides. The notes contain the share of received attention in a token's weight,
    the number of dampers if the latent has a live norm, and the approximation error if linear maps
    replace norms on queries and keys.
    """
    from kvfold.convert.transforms.head_norms import measure_norms
    from kvfold.convert.transforms.sinks import better_of_two_fits

    statistics = layer.require_statistics()
    # Sinks: least squares over tokens, or also weighted by the attention that they receive.
    (latent, dampers), share = better_of_two_fits(
        statistics, partial(_normalized, layer), lambda option: layer.error(option[0])
    )
    notes = {
        "received_attention_share": share,
        **({} if layer.centered else {"damper_channels": dampers}),
    }
    if not layer.keeps_norms:
        notes |= measure_norms(layer.weights, statistics, key_constant=layer.centered)
    return Fitted(latent, notes)


def _normalized(layer: LatentLayer, counted: "LayerStatistics") -> "tuple[LatentWeights, int]":
    """A latent fitted to statistics ``counted``, adapted to a live norm, if any, and its number of
    dampers.
    """
    from kvfold.convert.transforms.latent.variants import live_norm
    from kvfold.convert.transforms.sinks import add_damper

    if layer.centered:
        return fit_latent(layer, counted, layer.channels), 0
    plain = live_norm(fit_latent(layer, counted, layer.channels), layer.inputs)
    # Without weight on received attention, sinks do not matter and need no damper.
    if counted is layer.statistics or layer.channels < 2:
        return plain, 0
    damped = add_damper(fit_latent(layer, counted, layer.channels - 1), layer.require_statistics())
    return min(
        (plain, 0), (live_norm(damped, layer.inputs), 1), key=lambda option: layer.error(option[0])
    )


def fit_latent(layer: LatentLayer, statistics: "LayerStatistics", channels: int) -> "LatentWeights":
    """Convert ``layer`` to latent attention with ``channels`` channels, before any norm is applied
    to the latent.

    Norms on queries and keys are kept if the layout supports them; otherwise linear maps replace
    them.
    """
    from kvfold.convert.transforms.head_norms import linearize_heads
    from kvfold.convert.transforms.latent.factorization import factor_layer
    from kvfold.convert.transforms.latent.variants import query_latent

    weights = layer.weights
    centered = layer.centered
    if not layer.keeps_norms:
        weights = linearize_heads(weights, statistics, key_constant=centered)
    place = layer.rotary, layer.slots, channels
    latent = factor_layer(
        weights, statistics, *place, context=layer.context, scale=layer.scale, centered=centered
    )
    return (
        latent
        if layer.query_channels is None
        else query_latent(latent, statistics, layer.query_channels)
    )
