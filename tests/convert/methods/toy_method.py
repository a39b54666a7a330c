"""A method in one file: each group keeps its loudest head."""

from kvfold.convert.methods.registry import ConvertedLayer, FoldLayer, Method, register_method
from kvfold.convert.transforms.fold.pool import pool_heads


@register_method
class Loudest(Method):
    name = "loudest"
    targets = ("gqa", "mqa")
    reads_text = False
    pools = True
    card = "Each group keeps its loudest head"

    def fit_weights(self, layer: FoldLayer) -> ConvertedLayer:
        norms = layer.weights.k.norm(dim=(1, 2)).tolist()
        size = len(norms) // layer.kv_heads
        chosen = [
            max(range(first, first + size), key=norms.__getitem__)
            for first in range(0, len(norms), size)
        ]
        weights = pool_heads(layer.weights, layer.kv_heads, lambda heads: heads[chosen])
        return ConvertedLayer(weights)
