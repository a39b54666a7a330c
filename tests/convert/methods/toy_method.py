"""A method in one file: each group keeps its loudest head."""

from dataclasses import replace

from kvfold.convert.methods.registry import Fitted, FoldLayer, method


@method("loudest", targets=("gqa", "mqa"), reads_text=False, pools=True, card="Each group keeps its loudest head")
def loudest(layer: FoldLayer) -> Fitted:
    weights, count = layer.weights, layer.kv_heads
    size = weights.kv_heads // count
    chosen = [g * size + int(weights.k[g * size :][:size].norm(dim=(1, 2)).argmax()) for g in range(count)]
    return Fitted(replace(weights, k=weights.k[chosen], v=weights.v[chosen]))
