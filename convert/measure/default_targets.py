"""The targets that a model is swept over when none are named."""

from collections.abc import Iterator

from kvfold.convert.conversion.possible import possible_kv_heads
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import Model
from kvfold.convert.measure.sweep_targets import Options
from kvfold.convert.request import Layout
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems, model_problems
from kvfold.convert.targets.same_family import cache_elements

_FOLDS = 3  # numbers of key/value heads beside MQA that are swept over: the largest ones
_SERVED = ((512, 64), (256, 64))  # splits that MLA kernels are written for ...
_SERVED_FROM = 1024  # ... for sources that cache at least as many elements: they would save smaller ones too little
_PARTS = (4, 8)  # divisors of smaller caches


def default_targets(model: Model, layout: Layout) -> list[Options]:
    """A few folds, and latents of the sizes that kernels take or of parts of a small cache, largest cache first.

    Raises InputError for a model that nothing can be made of.
    """
    heads = [count for count in possible_kv_heads(model.geometry) if count > 1]
    targets: list[Options] = [{"to": "gqa", "kv_heads": count} for count in heads[:_FOLDS]]
    targets += [{"to": "mqa"}] if model.geometry.kv_heads > 1 else []
    targets += [] if model_problems(model) else _latents(model, layout)
    if not targets:
        raise InputError(
            "expected a model that GQA, MQA or MLA could be made of, found one whose cache cannot shrink: "
            "`kvfold inspect` says why"
        )
    return targets


def _latents(model: Model, layout: Layout) -> Iterator[Options]:
    """Budgets, or whole splits where kernels take no other."""
    present = cache_elements(model.geometry)
    if present < _SERVED_FROM:
        yield from ({"to": "mla", "budget": present // part} for part in _PARTS if present // part >= 4)
        return
    for rank, rope in _SERVED:
        if not latent_problems(model, LatentTarget(rank, rope, layout=layout)):
            yield {"to": "mla", "kv_rank": rank, "rope_dim": rope}
