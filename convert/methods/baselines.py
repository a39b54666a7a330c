"""Methods that do not read text: published baselines, which pool heads for GQA and MQA or factor
weights for MLA, and repeated heads.
"""

from kvfold.convert.methods.registry import (
    ConvertedLayer,
    FoldLayer,
    LatentLayer,
    Method,
    register_method,
)


class _PoolingMethod(Method):
    """Base class of methods that pool the key/value heads of each group and leave queries and
    output projection unchanged.
    """

    targets: tuple[str, ...] = ("gqa", "mqa")
    reads_text = False
    pools = True


@register_method
class MeanPooling(_PoolingMethod):
    """The method ``mean``: replaces each group of key/value heads by their mean."""

    name = "mean"
    card = (
        "Each KV head is the mean of the heads it replaces (Ainslie et al., 2023); the model needs"
        " uptraining"
    )

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        """Return the layer with each group of key/value heads replaced by their mean."""
        from kvfold.convert.transforms.fold import pool

        return ConvertedLayer(pool.average_heads(layer.weights, layer.kv_heads))


@register_method
class FirstHeadPooling(_PoolingMethod):
    """The method ``first``: replaces each group of key/value heads by its first head."""

    name = "first"
    card = (
        "Each group keeps its first head (a baseline from Ainslie et al., 2023); the model needs"
        " uptraining"
    )

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        """Return the layer with each group of key/value heads replaced by its first head."""
        from kvfold.convert.transforms.fold import pool

        return ConvertedLayer(pool.keep_first_heads(layer.weights, layer.kv_heads))


@register_method
class RandomHeads(_PoolingMethod):
    """The method ``random``: replaces each group of key/value heads by a newly drawn head."""

    name = "random"
    seeded = True
    card = (
        "Keys and values are random (a baseline from Ainslie et al., 2023); the model must be"
        " trained before use"
    )

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        """Return the layer with new random keys and values in place of each group of heads."""
        from kvfold.convert.transforms.fold import pool

        weights = pool.draw_random_heads(
            layer.weights, layer.kv_heads, seed=layer.seed, layer=layer.index, std=layer.std
        )
        return ConvertedLayer(weights)


@register_method
class RepeatedHeads(_PoolingMethod):
    """The method ``repeat``: repeats each key/value head, for tensor parallelism over more devices
    than the source has heads. Chosen for any target with more heads; the result is exact.
    """

    name = "repeat"
    targets = ("gqa",)
    card = (
        "Each KV head is repeated, so the model computes what its source computes, with a larger"
        " cache that more devices can share"
    )

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        """Return the layer with each key/value head repeated."""
        from kvfold.convert.transforms.fold import pool

        return ConvertedLayer(pool.repeat_heads(layer.weights, layer.kv_heads))


@register_method
class SvdLatent(Method):
    """The method ``svd``: factors the stacked projections ``[W_k; W_v]`` into a latent by a
    truncated SVD, without calibration text.
    """

    name = "svd"
    targets = ("mla",)
    reads_text = False
    card = (
        "Keys and values were factored by a singular value decomposition of their weights; the"
        " model needs uptraining"
    )

    def fit_weights(self, layer: LatentLayer) -> ConvertedLayer:
        """Return the layer converted to latent attention by a truncated SVD of its weights."""
        from kvfold.convert.transforms.head_norms import linearize_norms
        from kvfold.convert.transforms.latent.factorization import factor_by_svd
        from kvfold.convert.transforms.latent.variants import factor_queries
        from kvfold.convert.transforms.weights import make_blank_statistics

        weights = layer.weights
        gain = layer.gain
        if not layer.keeps_norms:
            weights = linearize_norms(weights, make_blank_statistics(weights, gain))
        latent = factor_by_svd(
            weights, layer.rotary, layer.slots, layer.channels, scale=layer.scale, gain=gain
        )
        # The singular vectors take no account of the norm's gain, nor does the query latent.
        if layer.query_channels is not None:
            latent = factor_queries(latent, make_blank_statistics(weights), layer.query_channels)
        return ConvertedLayer(latent)
