"""The ``principal`` method for MLA: a joint latent for keys and values, fitted to text."""

from typing import TYPE_CHECKING

from kvfold.convert.methods.registry import (
    DEFAULT,
    ConvertedLayer,
    LatentLayer,
    Method,
    register_method,
)

if TYPE_CHECKING:
    from kvfold.convert.transforms.latent.latent_weights import LatentWeights
    from kvfold.convert.transforms.weights import LayerStatistics


@register_method
class PrincipalLatent(Method):
    """The method ``principal`` for MLA: fits latents with and without extra weight on attention
    sinks, and keeps the one with the least held-out error.
    """

    name = DEFAULT
    targets = ("mla",)
    reads_text = True
    card = (
        "Shared keys and values are principal components fitted to text; queries and output weights"
        " absorb the change"
    )

    def fit_weights(self, layer: LatentLayer) -> ConvertedLayer:
        """Return the layer converted to latent attention by the fit with the least
        held-out error.
        """
        from kvfold.convert.transforms.latent.variants import adapt_to_norm, add_sink_channel

        statistics = layer.require_statistics()
        fits = []
        # Sinks: least squares over tokens, or also weighted by the attention that they receive.
        for weighted in statistics.list_token_weightings():
            latent = fit_latent(layer, weighted, layer.channels)
            if not layer.centered:
                latent = adapt_to_norm(latent, layer.inputs)
            fits.append(latent)
            # Without weight on received attention, sinks do not matter and need no sink channel.
            if weighted is not statistics and not layer.centered and layer.channels > 1:
                latent = add_sink_channel(
                    fit_latent(layer, weighted, layer.channels - 1), statistics
                )
                fits.append(adapt_to_norm(latent, layer.inputs))
        return ConvertedLayer(min(fits, key=layer.measure_error))


def fit_latent(layer: LatentLayer, statistics: "LayerStatistics", channels: int) -> "LatentWeights":
    """Return ``layer`` converted to latent attention with ``channels`` channels, fitted to
    ``statistics``, before any norm on the latent.

    Norms on queries and keys are kept if the layout supports them; otherwise linear maps replace
    them.
    """
    from kvfold.convert.transforms.head_norms import linearize_norms
    from kvfold.convert.transforms.latent.factorization import factor_layer
    from kvfold.convert.transforms.latent.variants import factor_queries

    weights = layer.weights
    if not layer.keeps_norms:
        weights = linearize_norms(weights, statistics, key_constant=layer.centered)
    latent = factor_layer(
        weights,
        statistics,
        layer.rotary,
        layer.slots,
        channels,
        context=layer.context,
        scale=layer.scale,
        centered=layer.centered,
    )
    if layer.query_channels is None:
        return latent
    return factor_queries(latent, statistics, layer.query_channels)
