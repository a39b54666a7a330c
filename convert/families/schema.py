"""The schema of a family file: one JSON object per model type, read strictly (an unknown or missing key is an error).

A file that ``extends`` another holds only what differs. Each of its sections (``config``, ``attention``, ``tensors``,
...) is merged with the base's entry by entry: an entry replaces the base's as a whole, and null removes it. Anything
that is no section, such as the list ``tolerated``, replaces the base's.

A value marked *expression* is a string such as ``num_key_value_heads * head_dim`` (the language is in ``values.py``)
over the config keys that the file lists under ``config``, and over ``layer``, ``layer_type`` and ``sparse`` where it is
evaluated per layer; or a JSON literal.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

Expression = Any
ABSENT: Any = object()  # "the file does not say", where null would mean something

# Roles of the tensors in the attention. A fused projection has three of them, sinks belong to the queries.
Role = Literal["q", "k", "v", "o"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "o")

# Roles of the tensors outside the attention, the keys of the section ``tensors``. Targets look tensors up by them, and
# a target refuses a family with a role that it has no place for.
_Outer = Literal["embedding", "positions", "project_in", "project_out", "head", "head_bias"]  # of the whole model
_OuterNorm = Literal["embedding_norm", "embedding_norm_bias", "final_norm", "final_norm_bias"]
# Norms of a layer: before a sublayer, behind it (post), or of one sublayer where the two of a parallel layer differ.
_Norm = Literal["attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias"]
_PostNorm = Literal["attention_post_norm", "mlp_post_norm"]
_OwnNorm = Literal["attention_own_norm", "attention_own_norm_bias", "mlp_own_norm", "mlp_own_norm_bias"]
# The MLP. ``gate_up`` is both in one tensor; the ``activation_`` roles are parameters of xIELU (apertus).
_Mlp = Literal["gate", "up", "gate_up", "down", "gate_bias", "up_bias", "down_bias"]
_Activation = Literal["activation_positive", "activation_negative", "activation_beta", "activation_eps"]
# Experts: a tensor for each (``expert_``), one for all (``experts_``), and the expert that every token takes.
_Expert = Literal["router", "router_bias", "expert_gate", "expert_up", "expert_down"]
_Experts = Literal["experts_gate_up", "experts_gate_up_bias", "experts_down", "experts_down_bias"]
_Shared = Literal["shared_gate", "shared_up", "shared_down", "shared_router"]
BlockRole = Literal[_Outer, _OuterNorm, _Norm, _PostNorm, _OwnNorm, _Mlp, _Activation, _Expert, _Experts, _Shared]


@dataclass(frozen=True)
class Key:
    """A key of config.json. ``type`` is checked; a key with neither ``default`` nor ``otherwise`` is required."""

    type: str
    aliases: tuple[str, ...] = ()  # older or other spellings, tried in order
    default: Any = ABSENT  # the value when the key is missing, as the stock class has it
    otherwise: Expression = ABSENT  # when the key is null, or missing without a default
    nullable: bool = False  # null means null
    per_layer: bool = False  # a list with an entry for every layer


@dataclass(frozen=True)
class Sizes:
    """Expressions for the numbers of ``Geometry``.

    ``kv_heads`` names the config key that a conversion rewrites. None: the stock class has a key and a value for every
    query head, or shares them as ``own_kv_heads`` says, and a conversion cannot change that.
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
class Norm:
    """The norms on queries and keys. ``extent`` says what one stored tensor covers:

    ``shared`` [D], one row for all heads; ``head`` [heads, D]; ``flat`` [heads * D], normalized over all heads at once;
    ``per_head`` one [D] tensor per head, whose name holds ``{head}``. ``after_rotary``: behind the rotary embedding.
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

    def modules(self, role: Role, heads: int) -> list[str]:
        """The modules of the norm of queries (``role`` q) or keys (k), relative to the attention's."""
        name = self.q if role == "q" else self.k
        return [name.replace("{head}", str(head)) for head in range(heads)] if self.extent == "per_head" else [name]


@dataclass(frozen=True)
class Attention:
    """The attention of a layer. Names are relative to ``module``, which holds ``{layer}``.

    ``layout``: queries, keys and values in three tensors, concatenated in one, or in one by groups (the queries that
    share a key, that key, its value). ``transposed``: weights are ``[inputs, outputs]``, the Conv1D of GPT-2.
    ``sinks``: the tensor with each query head's score for one more key, whose value is zero (gpt-oss). ``alibi``: the
    model hands linear biases by distance to its attention (ALiBi). ``shown``: the stock class calls transformers'
    attention functions, by which queries and keys are recorded. ``dropout`` is of attention weights in training,
    ``output_dropout`` of the output projection's result.
    """

    module: str
    layout: Literal["separate", "concatenated", "per_group"]
    o: str
    qkv_bias: Expression
    o_bias: Expression
    scale: Expression  # what multiplies q . k
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    norm: Norm | None = None
    sinks: str | None = None
    layer_type: Expression = None
    window: Expression = None
    softcap: Expression = None
    clip: Expression = None
    transposed: bool = False
    alibi: Expression = False
    shown: bool = True
    dropout: Expression = 0.0
    output_dropout: Expression = 0.0

    def place(self, layer: int) -> str:
        """The module of ``layer``."""
        return self.module.replace("{layer}", str(layer))


@dataclass(frozen=True)
class RopeOfType:
    """The rotary embedding of one layer type: base frequency, the older config key for it, whether scaling applies."""

    theta: float
    key: str | None
    scaled: bool


@dataclass(frozen=True)
class Rope:
    """The rotary embedding. ``theta`` and ``fraction`` are the class's defaults; ``fraction`` null: whole heads rotate.

    ``dims``: how many dims of a head rotate, where the config has their number. ``rotates`` is evaluated per layer;
    false: the model has no rotary embedding. ``keys``: the config's names of ``rope_theta`` and
    ``partial_rotary_factor``, where they differ. ``by_type``: layer types with another rotary embedding. ``renamed``:
    rope types that the class reads as another. ``original_positions``: the class's default of the config key
    ``original_max_position_embeddings``. ``table``: the class's default of ``rope_parameters``, where it is more than
    ``theta``. ``query_growth``: the key of the rope parameters by which queries grow with their position.
    """

    style: Literal["half", "interleaved"]
    theta: float
    fraction: float | None = None
    dims: Expression = None
    rotates: Expression = True
    by_type: Mapping[str, RopeOfType] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    original_positions: int | None = None
    table: Mapping[str, Any] = field(default_factory=dict)
    query_growth: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoutingSpec:
    """Expressions for ``Routing``, the choice and the weights of experts."""

    per_token: Expression
    renormalized: Expression


@dataclass(frozen=True)
class BlockSpec:
    """The rest of a decoder layer and of the model, as far as another class must be able to express it."""

    norm: Literal["rms", "layer"]
    norm_eps: Expression
    activation: Expression
    mlp: Literal["gated", "gated_fused", "plain"]
    order: Literal["pre", "post", "outer", "sandwich", "parallel"] | Expression
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_weight: bool = True
    sparse: Expression = False
    routing: RoutingSpec | None = None  # None where experts are chosen or weighed in another way
    tied: Expression = False
    residual_scale: Expression = 1.0
    embedding_scale: Expression = 1.0
    logit_scale: Expression = 1.0
    logit_softcap: Expression = None


@dataclass(frozen=True)
class TensorSpec:
    """A tensor outside the attention. ``name`` may hold ``{layer}`` and ``{expert}`` (counted by ``each``)."""

    name: str
    shape: tuple[Expression, ...]
    when: Expression = True
    each: Expression = None


@dataclass(frozen=True)
class Tolerated:
    """A tensor that some files hold and the class ignores."""

    name: str
    when: Expression = True


@dataclass(frozen=True)
class Family:
    """One model type, as its file says.

    ``also``: other names of ``architecture`` in published files. ``stem``: the beginning of the names of the stock
    config and headless model, where it is not that of ``architecture`` (``Gemma3Text``). ``prefix``: the beginning of
    the names of all tensors but the head's, which some published files leave out. ``requires``: config keys that must
    be missing, null or have this value.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Key]
    sizes: Sizes
    attention: Attention
    rotary: Rope
    block: BlockSpec
    tensors: Mapping[BlockRole, TensorSpec]
    tolerated: tuple[Tolerated, ...]
    also: tuple[str, ...] = ()
    stem: str = ""
    prefix: str = ""
    requires: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stock_classes(self) -> tuple[str, dict[str, str]]:
        """The stock class of attention modules, and the stock config and models by the Auto class that loads each."""
        # transformers derives the names of all classes of a model type from one stem: GPT2LMHeadModel, GPT2Attention.
        architecture = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        stem = self.stem or architecture
        return f"{architecture}Attention", {
            "AutoConfig": f"{stem}Config",
            "AutoModel": f"{stem}Model",
            "AutoModelForCausalLM": self.architecture,
        }

    def renamed(self, rename: Callable[[str], str]) -> "Family":
        """The same family for files whose tensors have other names."""
        return replace(
            self,
            attention=replace(self.attention, module=rename(self.attention.module)),
            tensors={role: replace(spec, name=rename(spec.name)) for role, spec in self.tensors.items()},
            tolerated=tuple(replace(item, name=rename(item.name)) for item in self.tolerated),
        )


def read_table(path: Path, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The family file at ``path``, decoded and merged with the files that it extends, which lie in the same folder.

    ``extending`` are the files that lead here. Raises ``ValueError`` for a circle and for a null without an entry to
    remove.
    """
    if path.name in extending:
        raise ValueError(f"{path.name}: extends itself, by {' -> '.join([*extending, path.name])}")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "extends" not in table:
        return table
    # Entries are replaced as a whole, one level deep: a key of config.json says in one place all that holds for it.
    merged = read_table(path.with_name(f"{table.pop('extends')}.json"), (*extending, path.name))
    for key, value in table.items():
        base = merged.get(key)
        if not isinstance(base, Mapping) or not isinstance(value, Mapping):
            merged[key] = value
            continue
        if absent := [name for name, entry in value.items() if entry is None and name not in base]:
            raise ValueError(
                f"{path.name}: {key}: the extended family has no {', '.join(absent)} that null could remove"
            )
        merged[key] = {name: entry for name, entry in {**base, **value}.items() if entry is not None}
    return merged


def parse_family(table: Any, where: str) -> Family:
    """A merged family file; ``where`` begins the message of the ``ValueError`` raised for what does not fit."""
    family: Family = _build(Family, table, where, "")
    # A typing error in a role would otherwise be a tensor that no target looks up, and so be lost in silence.
    roles = get_args(BlockRole)
    if unknown := sorted(set(family.tensors) - set(roles)):
        raise ValueError(f"{where}: tensors: unknown role {', '.join(unknown)}; known: {', '.join(roles)}")
    return family


def _build(cls: Any, table: Any, file: str, place: str) -> Any:
    """``table`` as ``cls``. Raises ``ValueError`` naming the unknown or missing keys and the place, as ``.sizes``."""
    where = f"{file}: {place[1:]}" if place else file
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: must be an object, not {table!r}")
    # The dataclass is the schema: its fields are the known keys, those without a default are required.
    known = {item.name: item for item in fields(cls)}
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")
    required = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    if absent := [name for name in required if name not in table]:
        raise ValueError(f"{where}: missing key {', '.join(absent)}")
    return cls(**{name: _value(known[name].type, value, file, f"{place}.{name}") for name, value in table.items()})


def _value(hint: Any, value: Any, file: str, place: str) -> Any:
    """``value`` of a field of type ``hint``, in which sections (``Norm | None``, ``Mapping[str, Key]``) are built."""
    section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
    if section is None or value is None:
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, list):
        return tuple(_build(section, entry, file, f"{place}[{at}]") for at, entry in enumerate(value))
    if get_origin(hint) is Mapping:
        return {name: _build(section, entry, file, f"{place}.{name}") for name, entry in value.items()}
    return _build(section, value, file, place)
