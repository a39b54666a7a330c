"""The package's README: its code runs, its table is what the functions say."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import kvfold.attention
from kvfold.attention import cache_numbers

README = (Path(kvfold.attention.__file__).parent / "README.md").read_text()


def test_code_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["z"].shape == (2, 32, 10, 128)
    assert names["step"].shape == (2, 32, 1, 128)
    assert names["kv"].length == 11
    assert torch.isfinite(names["y"]).all()


def test_table_of_cached_numbers():
    told = dict(re.findall(r"^\| (MHA|GQA|MQA|MLA) \| `[^`]*` \| (\d+)", README, re.MULTILINE))
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "kv_rank": 512, "rope_dim": 64}
    assert {name: int(number) for name, number in told.items()} == {
        name: cache_numbers(name.lower(), **sizes) for name in ("MHA", "GQA", "MQA", "MLA")
    }


@pytest.mark.parametrize("name", kvfold.attention.__all__)
def test_public_docstrings_give_the_shapes_of_tensors(name):
    thing = getattr(kvfold.attention, name)
    methods = [
        call
        for key, call in vars(thing).items()
        if inspect.isfunction(call) and not key.startswith("_")
    ]
    for call in [thing, *(methods if inspect.isclass(thing) else ())]:
        parameters = inspect.signature(call).parameters.values()
        tensors = [each.name for each in parameters if "Tensor" in str(each.annotation)]
        shapes = re.findall(r"\[[A-Z1|][^\]]*\]", inspect.getdoc(call) or "")
        assert shapes or not tensors, (
            f"{call.__qualname__} takes {tensors} and its docstring has no shape"
        )
