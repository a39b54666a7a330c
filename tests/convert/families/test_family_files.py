"""The family files: what they take over, a strict schema of which all is used, and expressions."""

import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from helpers.processes import run_python

from kvfold.convert.families import expressions, reading, schema
from kvfold.convert.families.family import family_of, load_family, supported
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import layer_rotary
from kvfold.convert.families.values import TYPES, Values
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.own_code import needs_own_code, own_folded_layout
from kvfold.convert.targets.own_latent import own_latent_layout

FOLDER = Path(schema.__file__).parent

PROMISED = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "olmo", "olmo2", "olmoe", "stablelm", "starcoder2", "granite", "smollm3", "cohere", "nemotron"),
    *("apertus", "arcee", "cohere2", "cwm", "ernie4_5", "exaone4", "glm", "glm4", "helium", "hunyuan_v1_dense"),
    *("hyperclovax", "internlm3", "iquestcoder", "jais2", "ministral", "ministral3", "olmo3", "seed_oss", "vaultgemma"),
    *("bloom", "falcon", "gpt2", "gpt_neox", "gpt_oss", "gptj", "mpt", "opt"),
]


ALL = supported()


def place(name: str) -> Path:
    """The file of a family."""
    return FOLDER / f"{name}.json"


def table(name: str) -> dict:
    """The family file with what it takes over from those it extends."""
    return reading.read_table(place(name))


def test_the_families_are_those_promised():
    assert supported() == tuple(sorted(PROMISED))


@pytest.mark.parametrize("name", ALL)
def test_a_file_is_named_for_its_model_type(name):
    assert load_family(name).model_type == name == table(name)["model_type"]


def raw(name: str) -> dict:
    return json.loads(place(name).read_text())


@pytest.mark.parametrize("name", [name for name in ALL if "extends" in raw(name)])
def test_a_file_that_extends_another_holds_differences_only(name):
    data = raw(name)
    base = {**table(data["extends"]), "own_code": {}}  # which is not passed on
    for section, value in data.items():
        if isinstance(value, dict):
            taken = base.get(section, {})
            assert [entry for entry in value if entry in taken and value[entry] == taken[entry]] == []
        else:
            assert value != base.get(section)


def write(folder: Path, **tables: dict) -> None:
    for name, data in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


def test_sections_merge_entry_by_entry(tmp_path):
    first = {"kind": "a", "block": {"x": {"one": 1, "two": 2}, "y": 1, "z": 1}, "names": ["a", "b"]}
    second = {"extends": "first", "block": {"x": {"one": None}, "y": None, "w": 5}, "names": ["c"]}
    write(tmp_path, first=first, second=second, third={"extends": "second", "kind": "c", "rest": {"q": 1}})
    merged = {"kind": "a", "block": {"x": {"one": None}, "z": 1, "w": 5}, "names": ["c"]}
    assert reading.read_table(tmp_path / "second.json") == merged
    assert reading.read_table(tmp_path / "third.json") == {**merged, "kind": "c", "rest": {"q": 1}}


def test_what_cannot_be_extended_is_named(tmp_path):
    write(tmp_path, first={"block": {}}, second={"extends": "first", "block": {"gone": None}})
    with pytest.raises(ValueError, match="null removes") as caught:
        reading.read_table(tmp_path / "second.json")
    assert str(caught.value) == ("second.json: block: null removes what the extended family has, found no gone there")
    write(tmp_path, first={"extends": "second"})
    with pytest.raises(ValueError, match="circle") as caught:
        reading.read_table(tmp_path / "first.json")
    assert str(caught.value) == (
        "first.json: expected no circle of extends, found first.json -> second.json -> first.json"
    )


def test_every_option_of_the_schema_is_used_by_some_family():
    families = [load_family(name) for name in ALL]
    parts = {
        schema.Family: families,
        schema.Key: [key for family in families for key in family.config.values()],
        schema.Sizes: [family.sizes for family in families],
        schema.Norm: [family.attention.norm for family in families if family.attention.norm is not None],
        schema.Attention: [family.attention for family in families],
        schema.RopeOfType: [own for family in families for own in (family.rotary.by_type or {}).values()],
        schema.Rope: [family.rotary for family in families],
        schema.BlockSpec: [family.block for family in families],
        schema.RoutingSpec: [family.block.routing for family in families if family.block.routing is not None],
        schema.TensorSpec: [tensor for family in families for tensor in family.tensors.values()],
        schema.OwnCode: [family.own_code for family in families if family.own_code is not None],
        schema.Tolerated: [extra for family in families for extra in family.tolerated],
    }
    idle = []
    for spec, found in parts.items():
        hints = get_type_hints(spec)
        for option in fields(spec):
            values = [getattr(part, option.name) for part in found]
            idle += [f"{spec.__name__}.{option.name}"] * all(value == option.default for value in values)
            idle += [f"{spec.__name__}.{option.name}: {c}" for c in choices(hints[option.name]) if not used(c, values)]
    idle += [f"type {kind}" for kind in TYPES if kind not in {key.type for key in parts[schema.Key]}]
    assert idle == []


def choices(hint: object) -> tuple:
    """The values that a type hint lists: both of a flag, all of a Literal, also as part of a union."""
    if hint is bool:
        return (True, False)
    parts = get_args(hint)
    return parts if get_origin(hint) is Literal else tuple(value for part in parts for value in choices(part))


def used(choice: object, values: list) -> bool:
    """Whether a value is ``choice``, or an expression that names it."""
    return any(value == choice or (isinstance(value, str) and repr(choice) in value) for value in values)


@pytest.mark.parametrize(
    "place",
    [
        (),
        ("config", "head_dim"),
        ("sizes",),
        ("attention",),
        ("attention", "norm"),
        ("rotary",),
        ("rotary", "by_type", "full_attention"),
        ("block",),
        ("tensors", "gate"),
        ("tolerated", 0),
    ],
)
def test_an_unknown_key_is_an_error_that_names_its_place(place):
    data = table("gemma3_text")
    inner = data
    for step in place:
        inner = inner[step]
    inner["colour"] = "blue"
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    with pytest.raises(ValueError, match="unknown key colour; known: ") as caught:
        reading.parse_family(data, "x.json")
    assert str(caught.value).startswith(f"x.json: {where}: unknown key" if where else "x.json: unknown key")


def test_a_missing_key_is_an_error_that_names_its_place():
    data = table("llama")
    del data["attention"]["scale"], data["attention"]["o"]
    with pytest.raises(ValueError, match=r"^x.json: attention: missing key o, scale$"):
        reading.parse_family(data, "x.json")


@pytest.mark.parametrize("name", ALL)
def test_every_key_of_every_file_is_read(name, tiny_family, monkeypatch):
    """Asks a family everything that kvfold asks, and sees that no part of its file was left unread."""
    data, read = table(name), defaultdict(set)
    family = reading.parse_family(data, name)
    for spec in (schema.Family, schema.Key, schema.Sizes, schema.Norm, schema.Attention, schema.Rope):
        record(spec, read, monkeypatch)
    for spec in (schema.RopeOfType, schema.BlockSpec, schema.RoutingSpec, schema.TensorSpec, schema.Tolerated):
        record(spec, read, monkeypatch)
    record(schema.OwnCode, read, monkeypatch)
    get = Values.__getitem__
    monkeypatch.setattr(Values, "__getitem__", lambda self, key: (read["config"].add(key), get(self, key))[1])
    config = json.loads((tiny_family(name) / "config.json").read_text())
    ask_everything(family, config)
    ask_everything(family, {**config, "tie_word_embeddings": True, "layer_types": None})
    Model(family, {**config, "rope_scaling": {"type": "yarn"}}).rope_table()
    Model(family, {key: value for key, value in config.items() if not key.startswith("rope_")}).rope_table()
    optional = {key for key in data["config"] if {"default", "otherwise"} & data["config"][key].keys()}
    absent = optional - {"num_key_value_heads", "num_hidden_layers"}  # by default of full size: many tensors to name
    ask_everything(family, {key: value for key, value in config.items() if key not in absent})
    nulls = {key for key in data["config"] if {"nullable", "otherwise"} & data["config"][key].keys()}
    ask_everything(family, {**config, **dict.fromkeys(nulls)})

    def unread(part: dict, spec: type) -> set[str]:
        return set(part) - read[spec.__name__]

    assert not unread(data, schema.Family)
    assert not set(data["config"]) - read["config"]
    assert not any(unread(key, schema.Key) for key in data["config"].values())
    assert not unread(data["sizes"], schema.Sizes)
    assert not unread(data["attention"], schema.Attention)
    assert not unread(data["attention"].get("norm", {}), schema.Norm)
    assert not unread(data["rotary"], schema.Rope)
    assert not any(unread(own, schema.RopeOfType) for own in data["rotary"].get("by_type", {}).values())
    assert not unread(data["block"], schema.BlockSpec)
    assert not unread(data["block"].get("routing", {}), schema.RoutingSpec)
    assert not unread(data.get("own_code", {}), schema.OwnCode)
    assert not any(unread(tensor, schema.TensorSpec) for tensor in data["tensors"].values())
    assert not any(unread(extra, schema.Tolerated) for extra in data["tolerated"])


def record(spec: type, read: dict, monkeypatch) -> None:
    known = {item.name for item in fields(spec)}

    def getattribute(self, name):
        if name in known:
            read[spec.__name__].add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(spec, "__getattribute__", getattribute)


def ask_everything(family: schema.Family, config: dict) -> None:
    from torch import zeros

    from kvfold.convert.families.layout import read_layer, write_layer

    assert family_of(config).model_type == family.model_type
    model = Model(family, config)
    _ = model.block, model.names, family.attention.shown
    if family.own_code is not None:
        stored = {
            name: SimpleNamespace(name=name, dtype="F32", shape=each.shape) for name, each in model.tensors.items()
        }
        checkpoint = SimpleNamespace(config=config, tensors=stored)
        target = LatentTarget(8, 4, layout="kvfold")
        theta = [[1.0, 0.1]] * model.geometry.layers
        own_latent_layout(model.as_stored(stored), checkpoint, target, theta, None)
    if needs_own_code(model):
        own_folded_layout(model, checkpoint, 1, None)
    else:
        model.kv_config(1)
    model.tensor_problems({"model.layers.0.self_attn.rotary_emb.inv_freq": zeros(1)})
    for layer in model.layers:
        layer_rotary(model, layer.index)
        weights = read_layer(model, layer.index, lambda name: zeros(model.tensors[name].shape))
        write_layer(model, layer.index, weights)


@pytest.mark.parametrize("name", ALL)
def test_expressions_refer_to_keys_of_the_file(name):
    data = table(name)
    known = {*data["config"], "layer", "layer_type", "sparse"}
    literal = {"module", "layout", "q", "k", "v", "o", "qkv", "sinks", "kind", "extent"}
    parts = [
        *data["sizes"].values(),
        *(value for key, value in data["attention"].items() if key not in literal and isinstance(value, str)),
        *(value for key, value in data["attention"].get("norm", {}).items() if key not in literal),
        data["rotary"].get("rotates"),
        *(value for key, value in data["block"].items() if key not in ("norm", "mlp", "routing")),
        *data["block"].get("routing", {}).values(),
        *(data.get("own_code", {}).get(f"{name}_dropout") for name in ("attention", "output")),
        *(key["otherwise"] for key in data["config"].values() if "otherwise" in key),
        *(size for tensor in data["tensors"].values() for size in tensor["shape"]),
        *(tensor.get(key) for tensor in data["tensors"].values() for key in ("when", "each")),
        *(extra.get("when") for extra in data["tolerated"]),
    ]
    assert set().union(*(expressions.names(part) for part in parts)) <= known


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a * b + 1", 7),
        ("2 ** a // b", 1),
        ("-a % b", 1),
        ("a / b", 2 / 3),
        ("items[a] if a < b <= 3 else None", "z"),
        ("not a or items", ["x", "y", "z"]),
        ("a and 0", 0),
        ("'x' in items and 'q' not in items", True),
        ("missing if a is None else 1", 1),
        (True, True),
        (5, 5),
        (None, None),
    ],
)
def test_expressions_are_those_of_python(expression, value):
    assert expressions.evaluate(expression, {"a": 2, "b": 3, "items": ["x", "y", "z"]}) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "a.b", "[1 for x in y]", "lambda: 1", "f'{a}'", "a @ b"])
def test_nothing_else_is_allowed(expression):
    with pytest.raises(ValueError, match="is not allowed in family-file expressions"):
        expressions.names(expression)
    with pytest.raises(ValueError, match="is not allowed in family-file expressions"):
        expressions.evaluate(expression, {"a": 1})


def test_a_malformed_expression_is_named():
    with pytest.raises(ValueError, match=r"^'a \+' is not an expression: "):
        expressions.names("a +")


def test_reading_families_imports_neither_torch_nor_transformers():
    code = (
        "import sys; import kvfold.convert.families.model; from kvfold.convert.families.family import *; "
        "[load_family(n) for n in supported()]; "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    run_python("-c", code)
