"""Pooled heads: the published baselines, from weights alone; queries and the output stay as they are."""

from kvfold.convert.methods.registry import Fitted, FoldLayer, method

_FOLDS = ("gqa", "mqa")


@method(
    "mean",
    targets=_FOLDS,
    reads_text=False,
    pools=True,
    card="Keys and values are the mean of the heads that they replace (Ainslie et al., 2023); it needs uptraining",
)
def mean(layer: FoldLayer) -> Fitted:
    from kvfold.convert.transforms.fold import pool

    return Fitted(pool.mean(layer.weights, layer.kv_heads))


@method(
    "first",
    targets=_FOLDS,
    reads_text=False,
    pools=True,
    card="Each group keeps its first head (a baseline of Ainslie et al., 2023); it needs uptraining",
)
def first(layer: FoldLayer) -> Fitted:
    from kvfold.convert.transforms.fold import pool

    return Fitted(pool.first(layer.weights, layer.kv_heads))


@method(
    "random",
    targets=_FOLDS,
    reads_text=False,
    pools=True,
    seeded=True,
    card="Keys and values are drawn at random (a baseline of Ainslie et al., 2023); it must be trained before use",
)
def random(layer: FoldLayer) -> Fitted:
    from kvfold.convert.transforms.fold import pool

    return Fitted(pool.random(layer.weights, layer.kv_heads, seed=layer.seed, layer=layer.index, std=layer.std))
