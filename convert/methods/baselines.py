"""Published baselines, which do not read text: pooled heads for GQA and MQA, factored weights for
MLA.
"""

from functools import partial

from kvfold.convert.methods.registry import Fitted, FoldLayer, LatentLayer, method

_POOLED = {
    "mean": (
        "Each KV head is the mean of the heads it replaces (Ainslie et al., 2023); the model needs"
        " uptraining"
    ),
    "first": (
        "Each group keeps its first head (a baseline from Ainslie et al., 2023); the model needs"
        " uptraining"
    ),
    "random": (
        "Keys and values are random (a baseline from Ainslie et al., 2023); the model must be"
        " trained before use"
    ),
}


def pooled(how: str, layer: FoldLayer) -> Fitted:
    """Return ``layer`` with the heads of each group pooled; ``how`` names a function in
    `transforms.fold.pool`.
    """
    from kvfold.convert.transforms.fold import pool

    weights = layer.weights
    kv_heads = layer.kv_heads
    if how == "random":
        return Fitted(
            pool.random(weights, kv_heads, seed=layer.seed, layer=layer.index, std=layer.std)
        )
    return Fitted((pool.mean if how == "mean" else pool.first)(weights, kv_heads))


# All three leave queries and the output projection unchanged; only ``random`` depends on the seed.
for _name, _card in _POOLED.items():
    _register = method(
        _name,
        targets=("gqa", "mqa"),
        reads_text=False,
        card=_card,
        pools=True,
        seeded=_name == "random",
    )
    _register(partial(pooled, _name))


@method(
    "svd",
    targets=("mla",),
    reads_text=False,
    card=(
        "Keys and values were factored by a singular value decomposition of their weights; the"
        " model needs uptraining"
    ),
)
def svd(layer: LatentLayer) -> Fitted:
    """Factor ``[W_k; W_v]`` by SVD, assuming white inputs scaled by the gain of the norm in front
    of the attention.
    """
    from kvfold.convert.transforms.head_norms import linearize_heads
    from kvfold.convert.transforms.latent.factorization import factor_by_svd
    from kvfold.convert.transforms.latent.variants import query_latent
    from kvfold.convert.transforms.weights import blank_statistics

    weights = layer.weights
    gain = layer.gain
    if not layer.keeps_norms:
        weights = linearize_heads(weights, blank_statistics(weights, gain))
    latent = factor_by_svd(
        weights, layer.rotary, layer.slots, layer.channels, scale=layer.scale, gain=gain
    )
    # The singular vectors take no account of the norm's gain, nor does the query latent.
    if layer.query_channels is not None:
        latent = query_latent(latent, blank_statistics(weights), layer.query_channels)
    return Fitted(latent)
