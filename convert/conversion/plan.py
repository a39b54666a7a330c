"""Plan a conversion from config.json and tensor headers alone, so that an impossible request fails
before any weight is read.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.attention.rounding_schemes import GROUP, find_rounding_problem
from kvfold.convert.checkpoint.files import (
    CONFIG,
    SINGLE,
    WEIGHT_SUFFIXES,
    decode_file_name,
    read_config,
)
from kvfold.convert.checkpoint.headers import (
    FLOAT_DTYPES,
    TensorInfo,
    count_tensor_bytes,
)
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import Shard, assign_shards
from kvfold.convert.errors import InputError, list_some, option_error
from kvfold.convert.families.model import Model, ModelSizes, make_model
from kvfold.convert.families.schema import ROLES, Role
from kvfold.convert.families.stored_tensors import list_unused_tensors, match_stored_tensors
from kvfold.convert.methods.registry import Method
from kvfold.convert.request import ConvertRequest
from kvfold.convert.targets.custom_code import (
    get_source_type,
    needs_custom_code,
    plan_custom_gqa_checkpoint,
)
from kvfold.convert.targets.engines import (
    EngineSupport,
    ServedModel,
    describe_folded_model,
    describe_mla_model,
    list_engine_support,
)
from kvfold.convert.targets.mla.layout import format_context, plan_mla_output
from kvfold.convert.targets.mla.spec import (
    MlaSpec,
    choose_mla_layout,
    count_cached_divisors,
    is_mla_config,
    list_mla_problems,
)
from kvfold.convert.targets.output_checkpoint import STORED_NAMES, OutputCheckpoint
from kvfold.convert.targets.same_family import (
    count_cache_elements,
    format_attention_label,
    plan_gqa_checkpoint,
)
from kvfold.convert.text.corpus import check_seq_len

if TYPE_CHECKING:
    from kvfold.convert.transforms.latent.slots import RotarySlots


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion decides before it reads weights: the source, the method, and the
    names, dtypes and shapes of all output tensors.

    request: with the numbers that ``auto`` stands for.
    checkpoint: the source.
    model: the source's family with its config.
    output: the config and the tensors of the output, and how layers are encoded.
    mla_spec: the split for an MLA target, otherwise None.
    reads: the names of the source tensors that each layer's method reads.
    result: what engines need to know of the output.
    slots: each layer's rotary slots for an MLA target; empty until they are chosen.
    """

    request: ConvertRequest
    checkpoint: Checkpoint
    model: Model
    output: OutputCheckpoint
    mla_spec: MlaSpec | None
    reads: Sequence[tuple[str, ...]]
    result: ServedModel
    slots: "Sequence[RotarySlots]" = ()

    @property
    def method(self) -> Method:
        """The conversion method that the request chooses."""
        return self.request.chosen_method

    @property
    def geometry(self) -> ModelSizes:
        """The source's sizes."""
        return self.model.geometry

    @property
    def source_kind(self) -> str:
        """The source's attention, such as MHA."""
        return format_attention_label(self.geometry.heads, self.geometry.kv_heads)

    @property
    def cache_elements(self) -> int:
        """The source's KV-cache elements per token per layer."""
        return count_cache_elements(self.geometry)

    @cached_property
    def shards(self) -> list[Shard]:
        """The output's weight files."""
        return assign_shards(self.output.tensors, self.request.shard_bytes)

    @cached_property
    def engines(self) -> list[EngineSupport]:
        """Which engines serve the output."""
        return list_engine_support(self.result)

    def with_rotary_slots(self, slots: "Sequence[RotarySlots]") -> "Plan":
        """Return this plan with the rotary slots chosen for each layer: the rotary pairs that the
        shared MLA key keeps. The output's config gets their frequencies.
        """
        output = self.output.with_frequencies([layer.theta.tolist() for layer in slots])
        return replace(self, output=output, slots=slots)


def make_plan(request: ConvertRequest, checkpoint: Checkpoint) -> Plan:
    """Plan the conversion of ``checkpoint`` by ``request``. An MLA plan is complete only after
    `Plan.with_rotary_slots`, which needs weights.

    With a budget, the largest split stands in for all until one is chosen. Raises InputError if the
    tensors do not match config.json or the target is not possible.
    """
    model, checkpoint = match_model(checkpoint)
    model, checkpoint = match_model(correct_tied_flag(model, checkpoint))
    non_float_tensors = [
        f"{name} is {checkpoint.tensors[name].dtype}"
        for name in model.tensors  # buffers beside weights and biases may hold whole numbers
        if checkpoint.tensors[name].dtype not in FLOAT_DTYPES
    ]
    if non_float_tensors:
        raise InputError(
            f"{checkpoint.origin}: weights must be floats, but {list_some(non_float_tensors)};"
            " use a checkpoint whose weights are not quantized"
        )
    model.check_config_values()
    if request.method is None and (request.kv_heads or 0) > model.geometry.kv_heads:
        request = replace(request, method="repeat")
    if request.context is not None:
        positions = model.geometry.positions
        if request.context > positions:
            raise option_error(
                "context", request.context, f"must be at most the source's, {positions} tokens"
            )
        model = model.shorten_context(request.context)
    positions = model.geometry.positions
    # Methods assume the rotary frequencies of short texts.
    request = request.resolve_auto_length(model.short_context or positions)
    if request.calibrated:
        check_seq_len(request.calibration_length, positions, checkpoint.origin)
    if request.to != "mla":
        return _plan_fold(request, checkpoint, model)
    plan = plan_mla(request, checkpoint, model, list_mla_specs(request, model)[-1])
    if request.budget is not None:
        kind = f"MLA, split by measured drift{format_context(model)}"
        plan = replace(plan, output=replace(plan.output, kind=kind))
    return plan


def match_model(checkpoint: Checkpoint, model: Model | None = None) -> tuple[Model, Checkpoint]:
    """Return the model in ``checkpoint``, and the checkpoint with its tensors by the names of the
    model's class. It lacks the tensors that the class does not load, as its ``notes`` say. Without
    ``model``, config.json describes it.

    Raises InputError if a tensor is missing, unknown or of another shape than config.json says.
    """
    model = model or make_model(checkpoint.config, checkpoint.tensors)
    tensors = match_stored_tensors(model, checkpoint.tensors)
    notes = checkpoint.notes
    if unused := list_unused_tensors(model, tensors):
        notes += (
            f"{checkpoint.origin}: {model.family.architecture} with {model.geometry.layers} layers"
            f" does not load {list_some(unused)}; left out",
        )
        for name in unused:
            del tensors[name]
    origin = f"{checkpoint.origin}: the tensors do not match config.json"
    heads = model.list_names("head")
    if heads and {*model.tensors} - {*tensors} == {*heads}:
        raise InputError(
            f"{origin}: {heads[0]} is missing, and tie_word_embeddings is false; use the model with"
            " its language-modeling head, or set tie_word_embeddings to true if the embedding is"
            " its head"
        )
    if problems := model.list_tensor_problems(tensors):
        raise InputError(
            f"{origin} (model_type {model.family.model_type!r}): {'; '.join(problems)}; check that"
            " the weights and config.json are from the same model"
        )
    stored = checkpoint.stored or checkpoint.tensors
    return model, replace(checkpoint, tensors=tensors, stored=stored, notes=notes)


def correct_tied_flag(model: Model, checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with ``tie_word_embeddings: false`` in its config if its files have an
    output head that differs from the embedding, as many full fine-tunes of tied models end.
    """
    key = "tie_word_embeddings"
    head = model.family.tensors.get("head")
    (embedding,) = model.list_names("embedding")
    tied = model.block.tied or checkpoint.config.get(key)
    if not tied or head is None or head.name not in checkpoint.tensors:
        return checkpoint
    if checkpoint.has_equal_tensors(embedding, head.name):
        return checkpoint
    config = {**checkpoint.config, key: False}
    if isinstance(config.get("text_config"), Mapping):
        config["text_config"] = {**config["text_config"], key: False}
    return replace(checkpoint, config=config)


def plan_mla(request: ConvertRequest, checkpoint: Checkpoint, model: Model, spec: MlaSpec) -> Plan:
    """Plan a conversion to MLA with the ranks and the layout of ``spec``."""
    reads = [model.list_attention_tensors(layer) for layer in range(model.geometry.layers)]
    if spec.layout != "kvfold":
        # Stock classes store gate and up separately, so a tensor that combines both is split.
        for layer, names in enumerate(reads):
            reads[layer] = names + model.list_names("gate_up", layer)
    output = plan_mla_output(model, checkpoint, spec, request.dtype)
    return Plan(request, checkpoint, model, output, spec, reads, describe_mla_model(model, spec))


def _plan_fold(request: ConvertRequest, checkpoint: Checkpoint, model: Model) -> Plan:
    """Plan a conversion to GQA or MQA. Raises InputError if the method, the layout or the number of
    key/value heads does not suit the model.
    """
    method = request.chosen_method
    kv_heads = request.result_kv_heads
    if model.qk_norm is not None and model.qk_norm.after_rotary and method.needs_linear_keys:
        raise option_error(
            "method",
            request.resolved_method,
            f"does not support {model.family.model_type}, which normalizes queries and keys after"
            " their rotary embedding; use --method mean with --refine auto",
        )
    check_kv_heads(kv_heads, model.geometry, request.allow_growth)
    if (kv_heads > model.geometry.kv_heads) != (request.resolved_method == "repeat"):
        raise option_error(
            "method",
            request.resolved_method,
            f"does not suit --kv-heads {kv_heads} of a model with {model.geometry.kv_heads}: repeat"
            " is for more heads, all others are for fewer; omit --method",
        )
    custom_code = needs_custom_code(model)
    if request.layout is not None and not custom_code:
        raise option_error(
            "layout",
            request.layout,
            f"is not needed, because the stock class of {model.family.model_type} supports"
            f" --to {request.to}; remove --layout",
        )
    # Pooling leaves queries and the output alone in a stock class.
    pools = method.pools and not request.calibrated and not custom_code
    roles: tuple[Role, ...] = ("k", "v") if pools else ROLES
    if custom_code:
        output = plan_custom_gqa_checkpoint(model, checkpoint, kv_heads, request.dtype)
    else:
        output = plan_gqa_checkpoint(model, checkpoint, kv_heads, roles, request.dtype)
    reads = [model.list_attention_tensors(layer, roles) for layer in range(model.geometry.layers)]
    if problems := list_rounding_problems(request, kv_heads * model.geometry.head_dim):
        raise InputError(f"the cache of the result cannot be rounded: {problems[0]}")
    return Plan(
        request, checkpoint, model, output, None, reads, describe_folded_model(model, kv_heads)
    )


def checkpoint_from_config(model: str | os.PathLike[str]) -> Checkpoint | None:
    """Return a checkpoint without weights, built from the config.json in the folder ``model``, for
    a dry run or an inspection. None if the folder has weights or the model is on the hub.
    """
    folder = Path(model).resolve()
    if not (folder / CONFIG).is_file() or any(
        path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()
    ):
        return None
    config, digest = read_config(folder)
    config.pop("quantization_config", None)
    # Names and shapes are the family's, in the dtype that the config names.
    dtype = read_config_dtype(config)
    converted = is_mla_config(config) or get_source_type(config) is not None
    infos = {
        name: TensorInfo(
            name, dtype, tensor.shape, SINGLE, 0, count_tensor_bytes(dtype, tensor.shape)
        )
        for name, tensor in ({} if converted else make_model(config).tensors).items()
    }
    return Checkpoint(folder, config, infos, decode_file_name(folder), digest)


def read_config_dtype(config: Mapping[str, Any]) -> str:
    """Return the safetensors dtype that a config.json names, or BF16."""
    return STORED_NAMES.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")


def list_mla_specs(request: ConvertRequest, model: Model) -> list[MlaSpec]:
    """List the ways to divide the requested MLA cache into latent channels and rotary dims, in
    ascending rotary dims; a single one without ``--budget``. Raises InputError if none is possible.
    """
    layout = request.layout or choose_mla_layout(model)
    if request.context and layout == "kvfold":
        raise option_error(
            "context",
            request.context,
            "has no effect in layout kvfold, which keeps the context of"
            f" {model.geometry.positions} tokens; omit it, or use --layout free",
        )
    if request.budget is None:
        specs = [MlaSpec(request.kv_rank or 0, request.rope_dim or 0, layout)]
    else:
        # P is a multiple of the largest power of two up to N/8: among these are the splits that
        # kernels support.
        step = max(2, 1 << (request.budget // 8).bit_length() >> 1)
        ropes = range(step, request.budget, step) if model.geometry.rotary_dims else (0,)
        # Norms that are kept use part of the budget.
        cached = request.budget - count_cached_divisors(model, MlaSpec(request.budget, 0, layout))
        specs = [MlaSpec(cached - rope, rope, layout) for rope in ropes]
    problems = [
        list_mla_problems(model, spec, allow_growth=request.allow_growth)
        + list_rounding_problems(request, spec.kv_rank)
        for spec in specs
    ]
    possible = [spec for spec, reasons in zip(specs, problems, strict=True) if not reasons]
    if possible:
        return possible
    present = count_cache_elements(model.geometry)
    if (request.budget or 0) >= present and not request.allow_growth:
        # However it is split: a split's own problems would not say so.
        raise option_error(
            "budget",
            request.budget,
            f"must be below the source's {present} KV-cache elements per token per layer; lower"
            " it, or add --allow-growth",
        )
    problem, *further_problems = problems[0]
    raise InputError(f"this model cannot become MLA: {problem}", further_problems)


def list_rounding_problems(request: ConvertRequest, channels: int) -> list[str]:
    """List why ``--cache`` cannot round values or latents of ``channels`` numbers per token."""
    problem = request.cache and find_rounding_problem(request.cache, channels)
    return [f"--cache {problem}, or a size that {GROUP} divides"] if problem else []


def list_possible_kv_heads(geometry: ModelSizes) -> list[int]:
    """List the numbers of key/value heads to which a model can be converted: proper divisors of its
    present number, largest first.
    """
    return [g for g in range(geometry.kv_heads - 1, 0, -1) if geometry.kv_heads % g == 0]


def check_kv_heads(kv_heads: int, geometry: ModelSizes, allow_growth: bool) -> None:
    """Raise InputError unless a model with the sizes ``geometry`` can be converted to ``kv_heads``
    key/value heads.
    """
    present = geometry.kv_heads
    allowed = list_possible_kv_heads(geometry)
    multiples = range(present, geometry.heads + 1, present)
    growth = [count for count in multiples if geometry.heads % count == 0]
    if allow_growth:
        allowed = [*reversed(growth), *allowed]
    if not allowed:
        repeated = ""
        if growth[1:]:
            repeated = (
                ", or repeat this head, for tensor parallelism, with --to gqa --allow-growth"
                f" --kv-heads {' or '.join(map(str, growth[1:]))}"
            )
        raise InputError(
            "the model is already MQA, with one key/value head, so fewer heads are impossible; use"
            f" it as it is{repeated}"
        )
    if kv_heads not in allowed:
        raise option_error(
            "kv_heads",
            kv_heads,
            f"must divide the source's {present} key/value heads, or, with --allow-growth, be a"
            f" multiple of these that divides its {geometry.heads} query heads; use"
            f" {', '.join(map(str, allowed))}",
        )
