"""Methods that read no text, the published baselines: pooled heads for GQA and MQA, factored weights for MLA."""

from functools import partial

from kvfold.convert.methods.registry import Fitted, FoldLayer, LatentLayer, method

_POOLED = {
    "mean": "Keys and values are the mean of the heads that they replace (Ainslie et al., 2023); it needs uptraining",
    "first": "Each group keeps its first head (a baseline of Ainslie et al., 2023); it needs uptraining",
    "random": "Keys and values are drawn at random (a baseline of Ainslie et al., 2023); it must be trained before use",
}


def pooled(how: str, layer: FoldLayer) -> Fitted:
    """``layer`` with the heads of each group pooled by ``how``, a function of `transforms.fold.pool`."""
    from kvfold.convert.transforms.fold import pool

    weights, kv_heads = layer.weights, layer.kv_heads
    if how == "random":
        return Fitted(pool.random(weights, kv_heads, seed=layer.seed, layer=layer.index, std=layer.std))
    return Fitted((pool.mean if how == "mean" else pool.first)(weights, kv_heads))


# Queries and the output projection stay as they are; only one of them depends on the seed.
for _name, _card in _POOLED.items():
    _register = method(
        _name, targets=("gqa", "mqa"), reads_text=False, card=_card, pools=True, seeded=_name == "random"
    )
    _register(partial(pooled, _name))


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
    # The singular vectors take no account of the norm's gain, nor does the query latent.
    blank = blank_statistics(weights.model_dim, weights.heads)
    return Fitted(latent if layer.query_channels is None else query_latent(latent, blank, layer.query_channels))
