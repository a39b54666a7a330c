"""A model as data: a family combined with a config. Its sizes, the attention of each layer, the
block around it, and the tensors in its checkpoints.

Does not import torch or transformers, so ``kvfold inspect`` needs less than a second to read
headers and a config.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from kvfold.convert.errors import InputError, list_some
from kvfold.convert.families.family import (
    WRAPPERS,
    find_family,
    find_text_type,
    find_wrapper_prefixes,
    read_text_config,
)
from kvfold.convert.families.rotary import (
    ContextRange,
    Frequencies,
    compute_frequencies,
    count_rotary_dims,
    read_positive_number,
    read_rope_parameters,
)
from kvfold.convert.families.schema import (
    ABSENT,
    ROLES,
    BlockSchema,
    Expression,
    Family,
    QueryKeyNorm,
    Role,
)
from kvfold.convert.families.values import ConfigValues, evaluate_expression, is_finite_number


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: layers, query heads H, key/value heads G, head dim D, model dim E, and
    rotary dims per head.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    rotary_dims: int
    vocabulary: int
    positions: int  # longest context that the model supports
    initializer_range: float


@dataclass(frozen=True)
class AttentionLayer:
    """The values of one layer's attention that its tensors do not contain.

    ``scale`` multiplies q . k. ``window`` is the number of keys that a query can attend to,
    including its own; None means all. ``softcap`` c turns scores s into ``c tanh(s / c)``. ``clip``
    bounds the elements of q, k and v after projection (olmo). ``growth`` g multiplies queries at
    position t by ``1 + g log(1 + floor(t / original context))`` (Llama 4).
    """

    index: int
    type: str | None
    scale: float
    window: int | None
    rotates: bool
    softcap: float | None
    clip: float | None
    sparse: bool  # a mixture of experts instead of one MLP
    growth: float


def _read_model_sizes(values: ConfigValues) -> ModelSizes:
    """The sizes of the model that the config states. Raises InputError unless the number of query
    heads is a multiple of the key/value heads.
    """
    sizes = values.family.sizes
    heads = evaluate_expression(sizes.heads, values)
    kv_heads = int(evaluate_expression(sizes.kv_heads or sizes.own_kv_heads or sizes.heads, values))
    if heads % kv_heads:
        raise InputError(
            f"config.json: {sizes.kv_heads or 'key/value heads'} is {kv_heads}, but it must divide"
            f" the {heads} query heads"
        )
    numbers = {
        item.name: evaluate_expression(getattr(sizes, item.name), values)
        for item in fields(ModelSizes)
        if item.name not in ("heads", "kv_heads", "rotary_dims")
    }
    return ModelSizes(
        heads=heads, kv_heads=kv_heads, rotary_dims=count_rotary_dims(values), **numbers
    )


@dataclass(frozen=True)
class StoredTensor:
    """The name, roles, layer and shape of a tensor that a checkpoint must contain.

    In the attention, ``roles`` lists the projections (q, k, v, o) whose weight, bias or norm the
    tensor contains: a fused projection has three roles, and sinks belong to the queries. Any other
    tensor has the one role in the family file.
    """

    name: str
    roles: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]


class Model:
    """A config.json interpreted by the rules of its family: sizes, layers, and the tensors that a
    checkpoint must contain.

    For a multimodal wrapper, this is its language model: ``config`` is the inner config, and all
    tensor names of the language model except its head begin with ``tower``, which is None for plain
    models. ``values`` contains the values of the config by their names in the family file;
    ``biased`` lists the projections that have a bias; ``qk_norm`` is the norm on queries and keys,
    or None.

    The constructor and all properties may raise ``InputError`` with the config key that is missing
    or wrong.
    """

    def __init__(self, family: Family, config: Mapping[str, Any], tower: str | None = None) -> None:
        """Read the sizes, biases and norms from ``config``."""
        self.family = family
        self.config = config
        self.tower = tower
        self.values = ConfigValues(family, config)
        self.geometry = _read_model_sizes(self.values)
        attention = family.attention
        self.biased = tuple(
            role
            for role in ROLES
            if evaluate_expression(
                attention.o_bias if role == "o" else attention.qkv_bias, self.values
            )
        )
        self.qk_norm: QueryKeyNorm | None = None
        norm = attention.norm
        if norm is not None and evaluate_expression(norm.when, self.values):
            self.qk_norm = replace(norm, eps=float(evaluate_expression(norm.eps, self.values)))

    @cached_property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The attention of each layer. Raises InputError if an attention scale is not above 0."""
        return tuple(self._read_attention_layer(index) for index in range(self.geometry.layers))

    @cached_property
    def block(self) -> BlockSchema:
        """The norms and the MLP around the attention, with all expressions evaluated."""
        block = self.family.block
        values = {
            item.name: evaluate_expression(getattr(block, item.name), self.values)
            for item in fields(block)
            if item.type is Expression and item.name != "sparse"
        }
        return replace(block, **values, sparse=any(layer.sparse for layer in self.layers))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors that a checkpoint with this config must contain, by name."""
        layers = [self._scope_values_to_layer(index) for index in range(self.geometry.layers)]
        tensors: dict[str, StoredTensor] = {}
        for role, spec in self.family.tensors.items():
            for scope in layers if "{layer}" in spec.name else [self.values]:
                if not evaluate_expression(spec.when, scope):
                    continue
                layer = scope.names.get("layer")
                name = spec.name.replace("{layer}", str(layer))
                shape = tuple(int(evaluate_expression(size, scope)) for size in spec.shape)
                count = 1 if spec.each is None else int(evaluate_expression(spec.each, scope))
                for expert in range(count):
                    expert_name = name.replace("{expert}", str(expert))
                    tensors[expert_name] = StoredTensor(expert_name, (role,), layer, shape)
        for layer in range(self.geometry.layers):
            module = self.family.attention.format_module_name(layer)
            for suffix, roles, shape in self._list_attention_shapes():
                name = f"{module}.{suffix}"
                tensors[name] = StoredTensor(name, roles, layer, shape)
        return tensors

    @cached_property
    def names_by_role(self) -> dict[tuple[str, int | None], tuple[str, ...]]:
        """The names of stored tensors by (role, layer); the layer is None for tensors outside the
        layers.

        Outside the attention, a role has one name, or one name per expert; a role that this config
        does not use is absent. The roles q, k, v and o have the names of weights, biases and norms.
        """
        names: dict[tuple[str, int | None], list[str]] = {}
        for tensor in self.tensors.values():
            for role in tensor.roles:
                names.setdefault((role, tensor.layer), []).append(tensor.name)
        return {key: tuple(same) for key, same in names.items()}

    def list_names(self, role: str, layer: int | None = None) -> tuple[str, ...]:
        """The names of the stored tensors with ``role`` in ``layer``, or outside the layers; none
        if this config does not use the role.
        """
        return self.names_by_role.get((role, layer), ())

    def list_attention_tensors(
        self, layer: int, roles: Collection[Role] = ROLES
    ) -> tuple[str, ...]:
        """The names of the stored tensors that contain any of ``roles`` of the attention in
        ``layer``, without duplicates.
        """
        names = [name for role in ROLES if role in roles for name in self.list_names(role, layer)]
        return tuple(dict.fromkeys(names))

    def compute_frequencies(self, layer: int, context: ContextRange = "short") -> Frequencies:
        """The rotary frequencies of ``layer`` in radians per position, and the factor for queries
        and keys, for short or for long texts; no frequencies if the layer does not rotate. Raises
        InputError for invalid rotary parameters.
        """
        how = self.layers[layer]
        return compute_frequencies(self.values, how.type, context) if how.rotates else ([], 1.0)

    @property
    def short_context(self) -> int | None:
        """The longest text in tokens with the short one of two sets of rotary frequencies
        (longrope); None if all texts that the model supports have the same frequencies.
        """
        table = read_rope_parameters(self.values)
        if table["rope_type"] != "longrope" or table.get("short_factor") == table.get(
            "long_factor"
        ):
            return None
        longest = int(read_positive_number(table, "original_max_position_embeddings"))
        return longest if longest < self.geometry.positions else None

    def shorten_context(self, positions: int) -> "Model":
        """The same model with a context of ``positions`` tokens. Rotary factors that follow from
        the context in the config stay.
        """
        model = copy(self)
        model.geometry = replace(self.geometry, positions=positions)
        return model

    def check_config_values(self) -> None:
        """Raise InputError if any value in the config has the wrong type, even if this model does
        not use it.
        """
        for name in self.family.config:
            if self.values.find_config_key(name)[1] not in (None, ABSENT):
                self.values[name]
        for layer_type in self.family.rotary.by_type:
            read_rope_parameters(self.values, layer_type)
        _ = self.layers

    def list_tensor_problems(self, stored: Mapping[str, Any]) -> list[str]:
        """At most three phrases, about the tensors that are missing from ``stored``, have the wrong
        shape, or are unknown. ``stored`` contains objects with a shape, by tensor name.
        """
        missing = []
        wrong = []
        for name, tensor in self.tensors.items():
            expected = list(tensor.shape)
            if name not in stored:
                missing.append(f"{name} {expected}")
            elif list(stored[name].shape) != expected:
                wrong.append(f"{name} is {list(stored[name].shape)} instead of {expected}")
        # Published files hold buffers that older classes stored and today's do not read (masks,
        # inverse frequencies).
        tolerated = "|".join(
            re.escape(item.name).replace(r"\{layer\}", r"\d+")
            for item in self.family.tolerated
            if evaluate_expression(item.when, self.values)
        )
        # The tensors of a wrapper outside its language model are copied whatever they are.
        tower = self.tower or ""
        unknown = [
            f"{name} {list(stored[name].shape)}"
            for name in stored
            if name not in self.tensors
            and not re.fullmatch(tolerated, name)
            and name.startswith(tower)
        ]
        problems = {"missing": missing, "wrong shape": wrong, "unknown": unknown}
        return [f"{kind}: {list_some(names)}" for kind, names in problems.items() if names]

    def _scope_values_to_layer(self, index: int) -> ConfigValues:
        """The config's values for expressions about layer ``index``: with ``layer``, ``layer_type``
        and ``sparse`` (experts instead of one MLP) added.
        """
        names: dict[str, Any] = {"layer": index}
        values = replace(self.values, names=names)
        names["layer_type"] = kind = evaluate_expression(self.family.attention.layer_type, values)
        if kind not in (None, "full_attention", "sliding_attention"):
            raise InputError(
                f"config.json: layer {index} has type {kind!r}, but model_type"
                f" {self.family.model_type!r} is supported only with 'full_attention' and"
                " 'sliding_attention'; use a model whose layers all have one of these types"
            )
        names["sparse"] = bool(evaluate_expression(self.family.block.sparse, values))
        return values

    def _read_attention_layer(self, index: int) -> AttentionLayer:
        """The attention of layer ``index``. Raises InputError if its scale is not above 0."""
        values = self._scope_values_to_layer(index)
        rotary = self.family.rotary
        attention = self.family.attention
        scale = evaluate_expression(attention.scale, values)
        if not is_finite_number(scale) or scale <= 0:
            raise InputError(
                f"config.json: the attention scale ({attention.scale}) must be above 0, not"
                f" {scale!r}"
            )
        growth = 0.0
        if rotary.query_growth is not None:
            table = read_rope_parameters(values, values["layer_type"])
            if table.get(rotary.query_growth):
                growth = read_positive_number(table, rotary.query_growth)
        names = ("window", "softcap", "clip")
        return AttentionLayer(
            index=index,
            type=values["layer_type"],
            scale=float(scale),
            rotates=bool(evaluate_expression(rotary.rotates, values)),
            sparse=values["sparse"],
            growth=growth,
            **{name: evaluate_expression(getattr(attention, name), values) for name in names},
        )

    def _list_attention_shapes(self) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
        """Yield the name within the module, the roles and the shape of each tensor in a layer's
        attention: weights, biases, sinks and norms.
        """
        attention = self.family.attention
        size = self.geometry
        rows = {
            "q": size.heads * size.head_dim,
            "k": size.kv_heads * size.head_dim,
            "v": size.kv_heads * size.head_dim,
            "o": size.model_dim,
        }
        qkv = ROLES[:3]
        groups = [qkv] if len(attention.qkv) == 1 else [(role,) for role in qkv]
        for name, roles in zip((*attention.qkv, attention.o), (*groups, ROLES[3:]), strict=True):
            shape = sum(rows[role] for role in roles), rows["q" if roles == ("o",) else "o"]
            yield f"{name}.weight", roles, shape[::-1] if attention.transposed else shape
            if roles[0] in self.biased:
                yield f"{name}.bias", roles, shape[:1]
        if attention.sinks is not None:
            yield attention.sinks, ("q",), (size.heads,)
        norm = self.qk_norm
        if norm is None:
            return
        for role, heads in (("q", size.heads), ("k", size.kv_heads)):
            extents = {"head": (heads, size.head_dim), "flat": (heads * size.head_dim,)}
            for name in norm.list_module_names(role, heads):
                for kind in norm.kinds:
                    yield f"{name}.{kind}", (role,), extents.get(norm.extent, (size.head_dim,))


def make_model(config: Mapping[str, Any], names: Collection[str] = ()) -> Model:
    """The model that a config.json describes; for a multimodal one, its language model. ``names``
    are the tensor names in the files.

    ``names`` is needed for wrappers. Raises ``InputError`` if the family is not supported.
    """
    family = find_family(config)
    if find_text_type(config) is None:
        return Model(family, config)
    prefixes = find_wrapper_prefixes(names)
    kind = config["model_type"]
    # The language model goes by the wrapper's name in messages and cards.
    family = replace(
        family.rename_tensors(prefixes.to_wrapped_name),
        model_type=kind,
        architecture=WRAPPERS[kind].architecture,
        also=(),
    )
    return Model(family, read_text_config(config, names), prefixes.tower)
