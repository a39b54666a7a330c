"""The schema of a family file: one JSON object per model type, read strictly (an unknown or missing
key is an error).

A file that ``extends`` another contains only the differences. Each section (``config``,
``attention``, ``tensors``, ...) is merged with the base's section: an entry replaces the base's
entry as a whole, and null removes it. A value that is not a section, such as the list
``tolerated``, replaces the base's value.

A field of type ``Expression`` is a JSON literal or a string such as ``num_key_value_heads *
head_dim`` (``values.py`` defines the language). The string can use the config keys listed under
``config``, and also ``layer``, ``layer_type`` and ``sparse`` if it is evaluated per layer.

The keys of ``tensors`` are roles of tensors outside the attention, which
``tests/convert/families/roles.json`` lists. Targets look tensors up by them, and a target refuses a
family with a role that it has no place for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

Expression = Any
ABSENT: Any = object()  # "the file does not say", where null would mean something

# Roles of the tensors in the attention. A fused projection has three of them, sinks belong to the
# queries.
Role = Literal["q", "k", "v", "o"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class ConfigKey:
    """A key in config.json whose value has this ``type``; the key is required unless it has
    ``default`` or ``otherwise``.
    """

    type: str
    aliases: tuple[str, ...] = ()  # older or other spellings, tried in order
    default: Any = ABSENT  # the value when the key is missing, as the stock class has it
    otherwise: Expression = ABSENT  # when the key is null, or missing without a default
    nullable: bool = False  # null means null
    per_layer: bool = False  # a list with an entry for every layer


@dataclass(frozen=True)
class SizeExpressions:
    """Expressions for the sizes of a model (`ModelSizes`), over the keys of its config.

    ``kv_heads`` is the config key that a conversion changes. It is None if the stock class has a
    fixed number of key/value heads, which a conversion cannot change: ``own_kv_heads``, or by
    default one per query head.
    """

    layers: Expression
    heads: Expression
    head_dim: Expression
    model_dim: Expression
    vocabulary: Expression
    positions: Expression
    initializer_range: Expression
    kv_heads: str | None = None
    own_kv_heads: Expression = None


@dataclass(frozen=True)
class QueryKeyNorm:
    """How a family stores the norms on queries and keys.

    ``extent`` is the part of the heads that one stored tensor covers: ``shared`` [D], one row for
    all heads; ``head`` [heads, D]; ``flat`` [heads * D], normalized over all heads at once;
    ``per_head`` one [D] tensor per head, with ``{head}`` in its name. ``after_rotary``: the norm
    follows the rotary embedding.
    """

    q: str
    k: str
    kind: Literal["rms", "layer"]
    extent: Literal["shared", "head", "flat", "per_head"]
    eps: Expression
    bias: bool = False
    offset: float = 0.0
    when: Expression = True
    after_rotary: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that a norm stores: ``weight``, and ``bias`` if it has one."""
        return ("weight", "bias") if self.bias else ("weight",)

    def list_module_names(self, role: str, heads: int) -> list[str]:
        """The names of the modules of the query norm (``role`` q) or key norm (k) within the
        attention module; one per head if each head has its own.
        """
        name = self.q if role == "q" else self.k
        if self.extent != "per_head":
            return [name]
        return [name.replace("{head}", str(head)) for head in range(heads)]


@dataclass(frozen=True)
class AttentionSchema:
    """How a family computes a layer's attention and stores its tensors; names are relative to
    ``module``, which contains ``{layer}``.

    ``qkv``: the projections of queries, keys and values, three or one for all. ``layout``: in one
    projection they are concatenated or interleaved by group (the queries that share a key, the key,
    its value). ``transposed``:
    weights are ``[inputs, outputs]``, as in the Conv1D of GPT-2. ``sinks``: the tensor with one
    score per query head for an extra key whose value is zero (gpt-oss). ``shown``: the stock class
    calls transformers' attention functions, which lets kvfold record queries and keys. ``dropout``
    applies to attention weights in training, ``output_dropout`` to the result of the output
    projection.
    """

    module: str
    qkv: tuple[str, ...]
    o: str
    qkv_bias: Expression
    o_bias: Expression
    scale: Expression  # what multiplies q . k
    layout: Literal["concatenated", "per_group"] = "concatenated"
    norm: QueryKeyNorm | None = None
    sinks: str | None = None
    layer_type: Expression = None
    window: Expression = None
    softcap: Expression = None
    clip: Expression = None
    transposed: bool = False
    shown: bool = True
    dropout: Expression = 0.0
    output_dropout: Expression = 0.0

    def format_module_name(self, layer: int) -> str:
        """The name of the attention module in ``layer``."""
        return self.module.replace("{layer}", str(layer))


@dataclass(frozen=True)
class LayerTypeRope:
    """The rotary embedding of one layer type: its base, the config key that older files use for the
    base, and whether ``rope_scaling`` applies.
    """

    theta: float
    key: str | None
    scaled: bool


@dataclass(frozen=True)
class RopeSchema:
    """How a family computes its rotary embedding. ``theta`` and ``fraction`` are class defaults; if
    ``fraction`` is null, whole heads rotate.

    ``dims``: the number of rotary dims per head, if the config contains it. ``rotates`` is
    evaluated per layer; a constant false means that the model has no rotary embedding. ``keys``:
    the config's names for ``rope_theta``, ``partial_rotary_factor`` and ``attention_factor``, if
    they differ.
    ``by_type``: layer types with a different rotary embedding. ``renamed``: rope types that the
    class treats as another type. ``original_positions``: the class's default for the config key
    ``original_max_position_embeddings``. ``table``: the class's default for ``rope_parameters``, if
    it contains more than ``theta``. ``query_growth``: the rope parameter that sets the growth of
    queries with their position.
    """

    style: Literal["half", "interleaved"]
    theta: float
    fraction: float | None = None
    dims: Expression = None
    rotates: Expression = True
    by_type: Mapping[str, LayerTypeRope] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    original_positions: int | None = None
    table: Mapping[str, Any] = field(default_factory=dict)
    query_growth: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockSchema:
    """How a family computes and stores the parts of the model around the attention: norms, MLP or
    experts, embedding and head.

    ``order``: ``pre`` x + f(norm(x)); ``post`` x + norm(f(x)); ``outer`` norm(x + f(x));
    ``sandwich`` pre and post; ``parallel`` x + attention(n) + mlp(n), with one n = norm(x) or a
    separate norm for each. ``mlp``: ``gated``, ``gated_fused`` (gate and up in one tensor) or
    ``plain``. The gain of a norm is weight + ``norm_offset``. ``sparse``: a mixture of experts
    instead of one MLP, in a layer (family file) or in any (``Model``). ``residual_scale``
    multiplies the output of each sublayer before it is added. ``experts_per_token``: each token is
    routed to that many experts, those with the largest softmax probabilities of the router, which
    weight their outputs, first divided by their sum if ``experts_renormalized``; null without
    experts, and where they are chosen or weighted in another way.
    """

    norm: Literal["rms", "layer"]
    norm_eps: Expression
    activation: Expression
    mlp: Literal["gated", "gated_fused", "plain"]
    order: Expression
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_weight: bool = True
    sparse: Expression = False
    experts_per_token: Expression = None
    experts_renormalized: Expression = None
    tied: Expression = False
    residual_scale: Expression = 1.0
    embedding_scale: Expression = 1.0
    logit_scale: Expression = 1.0
    logit_softcap: Expression = None


@dataclass(frozen=True)
class OtherTensorSpec:
    """A tensor outside the attention: its name, its shape, and when it exists. ``name`` may contain
    ``{layer}`` and ``{expert}``; ``each`` is the number of experts.
    """

    name: str
    shape: tuple[Expression, ...] = ()
    when: Expression = True
    each: Expression = None


@dataclass(frozen=True)
class Family:
    """One model type, as its family file describes it.

    ``also``: other spellings of ``architecture`` in published files. ``stem``: the first part of
    the class names of the stock config and base model, if it differs from ``architecture``
    (``Gemma3Text``). ``prefix``: the first part of all tensor names except the head's, which some
    published files omit. ``requires``: config keys that must be missing, null or equal to the given
    value. ``tolerated``: tensors of any shape that some published files contain although the class
    ignores them.
    """

    model_type: str
    architecture: str
    config: Mapping[str, ConfigKey]
    sizes: SizeExpressions
    attention: AttentionSchema
    rotary: RopeSchema
    block: BlockSchema
    tensors: Mapping[str, OtherTensorSpec]
    tolerated: tuple[OtherTensorSpec, ...]
    also: tuple[str, ...] = ()
    stem: str = ""
    prefix: str = ""
    requires: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stock_classes(self) -> tuple[str, dict[str, str]]:
        """The name of the attention class in transformers, and the names of the config and model
        classes by Auto class.
        """
        # transformers derives the names of all classes of a model type from one stem:
        # GPT2LMHeadModel, GPT2Attention.
        architecture = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        stem = self.stem or architecture
        return f"{architecture}Attention", {
            "AutoConfig": f"{stem}Config",
            "AutoModel": f"{stem}Model",
            "AutoModelForCausalLM": self.architecture,
        }

    def rename_tensors(self, rename: Callable[[str], str]) -> "Family":
        """The same family with every tensor name replaced by ``rename(name)``."""
        return replace(
            self,
            attention=replace(self.attention, module=rename(self.attention.module)),
            tensors={
                role: replace(spec, name=rename(spec.name)) for role, spec in self.tensors.items()
            },
            tolerated=tuple(replace(item, name=rename(item.name)) for item in self.tolerated),
        )


def read_family_table(path: Path) -> dict[str, Any]:
    """The contents of the family file at ``path``, merged with the file in the same folder that it
    extends.
    """
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "extends" not in table:
        return table
    # Entries are replaced as a whole, one level deep: a key of config.json says in one place all
    # that holds for it.
    merged = read_family_table(path.with_name(f"{table.pop('extends')}.json"))
    for key, value in table.items():
        if isinstance(merged.get(key), Mapping) and isinstance(value, Mapping):
            entries = {**merged[key], **value}
            value = {name: entry for name, entry in entries.items() if entry is not None}
        merged[key] = value
    return merged


def build_section(cls: Any, table: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass ``cls``, such as `Family`, from a JSON object. Raises ValueError
    with ``where``, the file and the section, if a key is missing or unknown.
    """
    # The dataclass is the schema: its fields are the known keys, those without a default are
    # required.
    hints = {item.name: item.type for item in fields(cls)}
    values = {
        key: _convert_field(hints.get(key), value, f"{where}: {key}")
        for key, value in table.items()
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _convert_field(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the field type ``hint`` requires; JSON objects become dataclasses, such as those
    of ``QueryKeyNorm | None`` or ``Mapping[str, ConfigKey]``.
    """
    section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
    if section is None or value is None:
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, list):
        return tuple(
            build_section(section, entry, f"{where}: {at}") for at, entry in enumerate(value)
        )
    if get_origin(hint) is Mapping:
        return {
            name: build_section(section, entry, f"{where}: {name}") for name, entry in value.items()
        }
    return build_section(section, value, where)
