"""The keys of a family file: one JSON object per model type, read strictly (an unknown or missing key is an error).

A file that ``extends`` another holds only what differs. Each of its sections (``config``, ``attention``, ``tensors``,
...) is merged with the base's entry by entry: an entry replaces the base's as a whole, and null removes it. Anything
but a section, such as the list ``tolerated``, replaces the base's; ``own_code`` is not passed on.

A value marked *expression* is a string in the language of ``expressions.py`` over the config keys that the file lists
under ``config`` (and ``layer``, ``layer_type``, ``sparse`` where it is evaluated per layer), or a JSON literal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Expression = Any
ABSENT: Any = object()  # "the file does not say", where null would mean something


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

    ``kv_heads`` names the config key that a conversion rewrites; None: the class gives every query head a key and a
    value of its own, or shares them as ``own_kv_heads`` says, which no conversion rewrites.
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


@dataclass(frozen=True)
class Attention:
    """The place of the attention in a layer. Names are relative to ``module``, which holds ``{layer}``.

    ``layout``: queries, keys and values in a tensor each, in one behind each other, or in one by groups: the queries
    that share a key, that key, its value. ``transposed``: weights are ``[inputs, outputs]`` (the Conv1D of GPT-2).
    ``sinks``: the tensor with a score per query head for one more key, whose value is zero (gpt-oss). ``alibi``: scores
    have linear biases by distance (ALiBi), which the model hands to its attention. ``shown``: the stock class calls
    transformers' attention functions, by which queries and keys are recorded.
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
    """``theta`` and ``fraction`` are the class's defaults; ``fraction`` null: whole heads rotate, always.

    ``rotates`` is evaluated per layer; false: the model has no rotary embedding. ``keys``: what the config calls
    ``rope_theta`` and ``partial_rotary_factor`` beside the rope parameters, where that differs. ``by_type``: layer
    types with a rotary embedding of their own. ``renamed``: rope types that the class reads as another.
    ``original_positions``: the class's default of the config key ``original_max_position_embeddings``, where it has
    one. ``table``: the class's default of ``rope_parameters``, where it is more than ``theta``. ``query_growth``: the
    key of the rope parameters by which queries grow with their position. ``dims``: how many
    dims of a head rotate, where the config has their number.
    """

    style: Literal["half", "interleaved"]
    theta: float
    fraction: float | None = None
    dims: Expression = None
    rotates: Expression = True
    by_type: Mapping[str, RopeOfType] | None = None
    renamed: Mapping[str, str] | None = None
    original_positions: int | None = None
    table: Mapping[str, Any] | None = None
    query_growth: str | None = None
    keys: Mapping[str, str] | None = None


@dataclass(frozen=True)
class RoutingSpec:
    """How tokens come to their experts, where the softmax of the router's logits says so.

    Each goes to the ``per_token`` experts of the largest probabilities, which weigh the outputs: as they are, or
    divided by their sum where ``renormalized``. Both are evaluated once per model.
    """

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
    routing: RoutingSpec | None = None  # of layers with experts; None: in another way than these
    tied: Expression = False
    residual_scale: Expression = 1.0
    embedding_scale: Expression = 1.0
    logit_scale: Expression = 1.0
    logit_softcap: Expression = None


@dataclass(frozen=True)
class OwnCode:
    """What layout ``kvfold`` puts its own attention in: names of transformers' classes, and the dropouts of training.

    ``attention`` is the class of the modules that are replaced; ``classes`` are the models by the Auto class that loads
    each. ``attention_dropout`` is of attention weights, ``output_dropout`` of what the output projection gives.
    """

    attention: str
    config: str
    classes: Mapping[str, str]
    attention_dropout: Expression = 0.0
    output_dropout: Expression = 0.0


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

    ``also``: other names of ``architecture`` in published files. ``prefix``: what begins the names of all tensors but
    the head's, and is left out in some published files. ``own_code``: the model in layout ``kvfold``. ``requires``:
    config keys that are missing, null or have this value.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Key]
    sizes: Sizes
    attention: Attention
    rotary: Rope
    block: BlockSpec
    tensors: Mapping[str, TensorSpec]  # by role, such as embedding, gate, final_norm
    tolerated: tuple[Tolerated, ...]
    also: tuple[str, ...] = ()
    prefix: str = ""
    own_code: OwnCode | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)

    def renamed(self, rename: Callable[[str], str]) -> "Family":
        """The same family where files call their tensors otherwise."""
        return replace(
            self,
            attention=replace(self.attention, module=rename(self.attention.module)),
            tensors={role: replace(spec, name=rename(spec.name)) for role, spec in self.tensors.items()},
            tolerated=tuple(replace(item, name=rename(item.name)) for item in self.tolerated),
        )
