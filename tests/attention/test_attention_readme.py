"""The package's README: its code runs."""

import re
from pathlib import Path

import kvfold.attention

README = (Path(kvfold.attention.__file__).parent / "README.md").read_text()


def test_code_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["z"].shape == (2, 32, 10, 128)
    assert names["step"].shape == (2, 32, 1, 128)
    assert names["kv"].length == 11
    assert names["y"].isfinite().all()
