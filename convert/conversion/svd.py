"""MLA from weights alone: a singular value decomposition of keys and values, the baseline without calibration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.method import Converted, Method
from kvfold.convert.conversion.plan import Plan, resolved
from kvfold.convert.conversion.source import source_layer, source_rotary
from kvfold.convert.progress import Stages
from kvfold.convert.transforms.head_norms import has_norms, linear_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.normed import svd_normed_latent
from kvfold.convert.transforms.latent.queries import query_latent
from kvfold.convert.transforms.latent.slots import Slots
from kvfold.convert.transforms.latent.svd import svd_latent
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import blank_statistics


class Svd(Method):
    """Every layer factored by itself; the rotary keys stride over the source's frequencies."""

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        yield cls(svd_plan(plan))

    def layers(self, journal: Journal) -> Iterator[Converted]:
        slots = svd_slots(self.plan)
        for layer in journal.pending:
            latent = svd_layer(self.plan, layer, slots[layer])
            yield Converted(layer, self.plan.layout.encode(layer, latent), {})


def svd_plan(plan: Plan) -> Plan:
    """``plan`` with the frequencies of the baseline."""
    return resolved(plan, plan.latent_target(), [each.theta.tolist() for each in svd_slots(plan)])


def svd_slots(plan: Plan) -> tuple[Slots, ...]:
    """The slots of the baseline by layer: a uniform stride over the frequencies."""
    thetas = [source_rotary(plan, layer).theta for layer in range(plan.geometry.layers)]

    def stride(layers: list[int]) -> Slots:
        theta = next((thetas[layer] for layer in layers if thetas[layer].numel()), None)
        if theta is None:
            return rope_slots.NO_SLOTS
        return rope_slots.stride_slots(theta, plan.geometry.kv_heads, plan.latent_target().rope_dim)

    return rope_slots.slots_by_layer(thetas, stride)


def svd_layer(plan: Plan, layer: int, slots: Slots) -> LatentWeights:
    """``layer`` as latent attention, from its weights alone. Raises InputError when a weight is not finite."""
    target, scale = plan.latent_target(), plan.model.layers[layer].scale
    names = plan.model.names.get(("attention_norm", layer))
    gain = plan.checkpoint.read(names[0]) if names else None
    weights = source_layer(plan, layer)
    blank = blank_statistics(weights.model_dim, weights.heads, scales=gain)
    if target.keeps_norms and has_norms(weights):
        rotary = source_rotary(plan, layer)
        return svd_normed_latent(weights, blank, rotary, slots, target.channels, scale=scale, gain=gain)
    weights = linear_heads(weights, blank)
    latent = svd_latent(weights, source_rotary(plan, layer), slots, target.channels, scale=scale, gain=gain)
    rank = plan.query_rank()
    if rank is None:
        return latent
    return query_latent(latent, blank_statistics(latent.model_dim, latent.heads), rank - target.constant)
