"""The package's README: its code runs, its table is what the functions say."""

import re
from pathlib import Path

import kvfold.attention
from kvfold.attention import cache_numbers

README = (Path(kvfold.attention.__file__).parent / "README.md").read_text()


def test_code_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["z"].shape == (2, 32, 10, 128)
    assert names["step"].shape == (2, 32, 1, 128)
    assert names["kv"].length == 11
    assert names["y"].isfinite().all()


def test_table_of_cached_numbers():
    rows = re.findall(
        r"^\| (MHA|GQA|MQA|MLA) \| `[^`]*` \| (\d+)",
        README,
        re.MULTILINE,
    )
    sizes = {
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "kv_rank": 512,
        "rope_dim": 64,
    }
    assert len(rows) == 4
    for variant, number in rows:
        assert int(number) == cache_numbers(variant.lower(), **sizes)
