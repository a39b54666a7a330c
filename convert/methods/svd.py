"""``svd``: keys and values factored by their weights alone, the baseline of MLA without calibration."""

from kvfold.convert.methods.registry import Fitted, LatentLayer, method


@method(
    "svd",
    targets=("mla",),
    reads_text=False,
    card="Keys and values were factored by a singular value decomposition of their weights; it needs uptraining",
)
def svd(layer: LatentLayer) -> Fitted:
    """Singular vectors of ``[W_k; W_v]``, inputs taken as white behind the gain of the attention's norm."""
    from kvfold.convert.transforms.head_norms import linear_heads
    from kvfold.convert.transforms.latent.latent import svd_latent
    from kvfold.convert.transforms.latent.variants import query_latent
    from kvfold.convert.transforms.weights import blank_statistics

    weights, gain = layer.weights, layer.gain
    if not layer.keeps_norms:
        weights = linear_heads(weights, blank_statistics(weights.model_dim, weights.heads, scales=gain))
    latent = svd_latent(weights, layer.rotary, layer.slots, layer.channels, scale=layer.scale, gain=gain)
    if layer.query_channels is None:
        return Fitted(latent)
    plain = blank_statistics(latent.model_dim, latent.heads)
    return Fitted(query_latent(latent, plain, layer.query_channels))
