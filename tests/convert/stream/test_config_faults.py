"""A config.json with a wrong value ends a calibrated conversion with an error that names it,
whoever reads it first.
"""

import shutil

import pytest
from helpers.cases import read_cases
from helpers.checkpoints import edit_json, run_conversion

from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError

CASES = read_cases(__file__)


@pytest.mark.parametrize(("family", "key", "changes"), CASES["values"], ids=str)
def test_a_wrong_value_is_named(tmp_path, tiny_family, family, key, changes):
    source = tiny_family(family, vocab_size=2048) if family else demo_folder()
    model = shutil.copytree(source, tmp_path / "model")
    edit_json(model / "config.json", **changes)
    options = {"to": "mqa", "group": "contiguous", "samples": 1, "seq_len": 8}
    named = rf"config.json: {key}\b.* must be " if key else r"config\.json"
    with pytest.raises(InputError, match=named):
        run_conversion(model, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
