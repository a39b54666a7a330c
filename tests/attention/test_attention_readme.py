"""The package's README: its code runs, its table is what the functions say."""

import re
from pathlib import Path

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


def test_every_public_name_resolves():
    for name in kvfold.attention.__all__:
        assert callable(getattr(kvfold.attention, name))
