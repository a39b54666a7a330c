"""Convert one layer: fit its new attention by the chosen method, adjust its output projection, and
train it (refinement).

Pooling heads needs no transformers, which takes seconds to import: modules that do are imported in
the functions that use them.
"""

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.convert.checkpoint.tensors import TORCH_DTYPES, refuse_non_finite
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import choose_fit_device
from kvfold.convert.errors import InputError
from kvfold.convert.families.layer_io import make_layer_rotary, read_attention_weights
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import read_rope_parameters
from kvfold.convert.methods.registry import (
    DEFAULT_OBJECTIVE,
    ConvertedLayer,
    FoldLayer,
    LatentLayer,
    Method,
    find_objective,
)
from kvfold.convert.targets.mla.spec import compute_query_rank
from kvfold.convert.transforms.fold.grouping import PairLosses
from kvfold.convert.transforms.weights import AttentionWeights, Rotary

if TYPE_CHECKING:
    from kvfold.convert.conversion.calibration import Calibration
    from kvfold.convert.training.refine import RefineSettings
    from kvfold.convert.walk.output_fit import AttentionUpdate
    from kvfold.convert.walk.walk import Student, Walk, WalkLayer


def make_walk(
    plan: Plan, calibration: "Calibration", refine: int | str, statistics_from: int
) -> "Walk":
    """Return an iterator over the layers of the source model. It runs the calibration and held-out
    tokens through each source layer and through the converted model so far.

    Statistics of the calibration sequences begin with layer ``statistics_from``, if the method
    needs them.
    """
    from kvfold.convert.walk.walk import Teacher, Walk

    tokens = calibration.tokens
    reads_text = plan.method.reads_text
    teacher = Teacher(
        calibration.source,
        tokens.held_out,
        # The calibration sequences are run for what is fitted to the student.
        tokens.calibration if reads_text or refine else None,
        plan.model,
        statistics_from if reads_text else plan.geometry.layers,
    )
    return Walk(teacher, build_student(plan, calibration))


def build_student(plan: Plan, calibration: "Calibration") -> "Student":
    """Return the converted model as a stream of layers, to run before its checkpoint is complete.
    Converted tensors are added to it layer by layer; all others are read from the source.
    """
    from kvfold.convert.walk.walk import Student

    return Student(
        calibration.source,
        plan.output,
        recast=plan.request.dtype != "auto",
        rounding=plan.request.cache,
    )


def convert_layer(
    plan: Plan,
    walk_layer: "WalkLayer",
    refine: int | str,
    pair_losses_cache: dict[bool, PairLosses] | None = None,
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return the output tensors of the converted layer at ``walk_layer``, by their names in the
    output files, and the layer's notes for ``kvfold.json``.

    The method fits the layer, a regression adjusts the output projection to the student's inputs,
    and ``refine`` steps of training follow. `fit_layer` explains ``pair_losses_cache``.
    """
    from kvfold.convert.walk.output_fit import refit_output_projection

    layer = fit_layer(plan, walk_layer.index, walk_layer, pair_losses_cache)
    weights = layer.weights
    if plan.method.reads_text:
        weights = refit_output_projection(walk_layer, weights, make_attention_update(plan))
    tensors = plan.output.encode_layer(walk_layer.index, weights)
    if not refine:
        return tensors, dict(layer.notes)
    from kvfold.convert.training.refine import refine_layer

    refined = refine_layer(walk_layer, tensors, make_refine_settings(plan, refine))
    return refined.tensors, {**layer.notes, "refinement": refined.summarize()}


def fit_layer(
    plan: Plan,
    index: int,
    walk_layer: "WalkLayer | None" = None,
    pair_losses_cache: dict[bool, PairLosses] | None = None,
) -> ConvertedLayer:
    """Return the attention weights of layer ``index``, converted by the method of ``plan`` but not
    trained yet.

    ``walk_layer`` is None without text. ``pair_losses_cache`` caches results for folds of the same
    layer to other numbers of heads. Raises InputError for weights that are not finite.
    """
    request = plan.request
    model = plan.model
    spec = plan.mla_spec
    layer: FoldLayer | LatentLayer
    if spec is None:
        # Heads that share already were trained to: by default they stay with their neighbors.
        shares = plan.geometry.kv_heads < plan.geometry.heads
        group = request.group or ("contiguous" if shares else "similar")
        layer = FoldLayer(
            index=index,
            weights=read_source_layer(plan, index),
            kv_heads=request.result_kv_heads,
            rotary=get_fold_rotary(plan, index),
            context=count_visible_positions(model, index),
            std=plan.geometry.initializer_range,
            seed=request.seed,
            similar=group == "similar",
            objective=find_objective(request.objective or DEFAULT_OBJECTIVE),
            pair_losses_cache={} if pair_losses_cache is None else pair_losses_cache,
        )
    else:
        rank = compute_query_rank(model, spec)
        norms = model.list_names("attention_norm", index)
        weights = read_source_layer(plan, index)
        inputs = None if walk_layer is None else walk_layer.inputs
        layer = LatentLayer(
            index=index,
            weights=weights,
            channels=spec.kv_rank - spec.has_constant_channel,
            slots=plan.slots[index],
            rotary=make_layer_rotary(model, index),
            context=count_visible_positions(model, index),
            scale=model.layers[index].scale,
            query_channels=None if rank is None else rank - spec.has_constant_channel,
            centered=spec.layout != "engine",
            keeps_norms=spec.layout == "kvfold",
            gain=plan.checkpoint.read_tensor(norms[0]) if norms else None,
            inputs=torch.empty(0, weights.model_dim) if inputs is None else inputs,
        )
    if walk_layer is None:
        return plan.method.fit_weights(layer)
    layer = replace(layer, measure_error=walk_layer.measure_error, statistics=walk_layer.statistics)
    device = choose_fit_device(walk_layer.student.stream.device)
    try:
        return fit_on_device(plan.method, layer, device)
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        # Too little memory, or a decomposition that the GPU's library does not solve.
        if not request.quiet:
            _print_once(f"the GPU failed to fit a layer ({type(error).__name__}), so the CPU does")
        if isinstance(layer, FoldLayer):
            layer.pair_losses_cache.clear()
        return fit_on_device(plan.method, layer, torch.device("cpu"))


def fit_on_device(
    method: Method, layer: FoldLayer | LatentLayer, device: torch.device
) -> ConvertedLayer:
    """Return the converted layer, whose weights are in the host's memory, fitted on ``device``."""
    tensors = {
        field.name: value.to(device)
        for field in fields(layer)
        if hasattr(value := getattr(layer, field.name), "to")
    }
    converted = method.fit_weights(replace(layer, **tensors))
    return replace(converted, weights=converted.weights.to("cpu"))


@cache
def _print_once(message: str) -> None:
    """Print ``message`` to stderr, unless it was printed before."""
    print(message, file=sys.stderr)


def count_visible_positions(model: Model, layer: int) -> int:
    """Return the number of positions that a query in ``layer`` can see: the layer's window, or the
    context of ``model``.
    """
    positions = model.geometry.positions
    return min(positions, model.layers[layer].window or positions)


def read_source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """Read the source model's query, key, value and output projections in ``layer``. Raises
    InputError if a weight that the method needs is not finite.
    """
    checkpoint = plan.checkpoint
    needed = set(plan.reads[layer])

    def read_tensor(name: str) -> Tensor:
        """Return the tensor ``name`` of the source, checked for NaN and infinity. A tensor that the
        method does not need is an empty one on the meta device.
        """
        info = checkpoint.tensors[name]
        if name not in needed:
            # Pooling leaves queries and the output alone: they have a shape, but no bytes are read.
            return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        tensor = checkpoint.read_tensor(name)
        refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {info.file}")
        return tensor

    return read_attention_weights(plan.model, layer, read_tensor)


def get_fold_rotary(plan: Plan, layer: int) -> Rotary:
    """Return the rotary frequencies of ``layer`` that a conversion to GQA or MQA assumes while it
    fits keys. They never change the output's own RoPE.
    """
    try:
        return make_layer_rotary(plan.model, layer)
    except InputError:
        # Rope types whose frequencies depend on the text length (dynamic) are fitted as for short
        # texts.
        model = plan.model
        kind = model.layers[layer].type
        table = {**read_rope_parameters(model.values, kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(
            model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables}
        )
        return make_layer_rotary(plain, layer)


def make_refine_settings(plan: Plan, steps: int | str) -> "RefineSettings":
    """Return the training task that refines one converted layer in ``steps`` steps: which norms and
    scales act on its attention output, and whether it has a constant channel to keep.
    """
    from kvfold.convert.training.refine import RefineSettings

    update = make_attention_update(plan)
    if plan.mla_spec is None or plan.output.code is not None:
        return RefineSettings(steps, plan.request.seed, update, update)
    # DeepSeek's layers add their attention as it is: scales and norms of the source are in its
    # weights.
    return RefineSettings(
        steps, plan.request.seed, update, constant=plan.mla_spec.has_constant_channel
    )


def make_attention_update(plan: Plan) -> "AttentionUpdate":
    """Return how the source's layers add the attention output to the residual stream: the residual
    scale, and the name of a norm after the attention, if any.
    """
    from kvfold.convert.walk.output_fit import AttentionUpdate

    norms = plan.model.list_names("attention_post_norm", 0)
    norm = norms[0].split(".0.", 1)[1].removesuffix(".weight") if norms else None
    return AttentionUpdate(plan.model.block.residual_scale, norm)
