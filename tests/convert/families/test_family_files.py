"""The family files: what they take over, a strict schema of which all is used, and expressions."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from helpers.checkpoints import read_json
from helpers.processes import run_python

from kvfold.convert.families import schema, values
from kvfold.convert.families.family import list_supported_model_types, load_family
from kvfold.convert.families.model import Model

FOLDER = Path(schema.__file__).parent
ROLES = read_json(Path(__file__).with_name("roles.json"))
TINY = {"vocab_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}


def table(name):
    """The family file with what it takes over from those it extends."""
    return schema.read_family_table(FOLDER / f"{name}.json")


@pytest.mark.parametrize(
    "place", [(), ("config", "head_dim"), ("rotary", "by_type", "full_attention"), ("tolerated", 0)]
)
def test_an_unknown_or_missing_key_is_an_error_that_names_its_place(place):
    data = inner = table("gemma3_text")
    for step in place:
        inner = inner[step]
    inner["colour"] = "blue"
    with pytest.raises(ValueError, match="'colour'") as caught:
        schema.build_section(schema.Family, data, "x.json")
    assert all(str(step) in str(caught.value) for step in place)
    del inner["colour"], data["attention"]["scale"]
    with pytest.raises(ValueError, match=r"x.json: attention: .*'scale'"):
        schema.build_section(schema.Family, data, "x.json")


def sections_of(part):
    """The sections of a family, itself included, however deep."""
    inner = ()
    if is_dataclass(part):
        yield part
        inner = [getattr(part, item.name) for item in fields(part)]
    elif isinstance(part, Mapping):
        inner = part.values()
    elif isinstance(part, tuple):
        inner = part
    for entry in inner:
        yield from sections_of(entry)


def test_the_example_of_the_guide_is_a_family(tmp_path):
    guide = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    example = re.search(r"```json\n(.*?)```", guide.split("**A family**")[1], re.DOTALL)[1]
    (tmp_path / "llama.json").write_text((FOLDER / "llama.json").read_text())
    (tmp_path / "NAME.json").write_text(example)
    family = schema.build_section(
        schema.Family, schema.read_family_table(tmp_path / "NAME.json"), "NAME.json"
    )
    model = Model(family, {**TINY, "hidden_size": 32, "num_attention_heads": 4})
    assert model.geometry.rotary_dims == 4
    assert model.tensors["model.layers.0.self_attn.qkv_proj.weight"].roles == ("q", "k", "v")


@pytest.mark.parametrize("name", list_supported_model_types())
def test_expressions_refer_to_keys_of_the_file_and_to_all_of_them_and_roles_exist(name):
    family = load_family(name)
    used = {family.sizes.kv_heads}
    for section in sections_of(family):
        for item in fields(section):
            if "Any" in str(item.type) and item.name not in ("default", "requires", "table"):
                value = getattr(section, item.name)
                for expression in value if isinstance(value, tuple) else (value,):
                    if isinstance(expression, str):
                        used |= {*compile(expression, item.name, "eval").co_names}
    assert used - {"layer", "layer_type", "sparse", None} == set(family.config)
    # No target looks up a misspelled role: its tensor would be lost in silence.
    assert set(family.tensors) <= {role for roles in ROLES.values() for role in roles}


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "a.b", "[1 for x in y]", "lambda: 1", "f'{a}'"]
)
def test_nothing_else_is_allowed(expression):
    with pytest.raises(ValueError, match="is not allowed in family-file expressions"):
        values.evaluate_expression(expression, {"a": 1})


def test_reading_families_and_wrappers_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from kvfold.convert.families.model import make_model; from"
        " kvfold.convert.families.family import load_family, list_supported_model_types;"
        " [load_family(n) for n in list_supported_model_types()]; make_model({'model_type':"
        " 'llava', 'text_config': {}, 'vision_config': {}}).tensors;"
        " sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    run_python("-c", code)
