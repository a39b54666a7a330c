"""Files beside the weights are read before the first step: a bad one must not cost the training,
nor a link leak.
"""

import shutil
from itertools import product
from pathlib import Path

import pytest

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain.run import read_side_files

NAMES = ("README.md", "kvfold.json", "modeling.py")
NO_OBJECTS = (b"", b"[]", b'{"a": 1}}', b"\xff{}")


@pytest.fixture
def model(tiny_family, tmp_path):
    return Path(shutil.copytree(tiny_family("llama"), tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *product(NAMES, ("a link", "a folder")),
        *product(["kvfold.json"], NO_OBJECTS),
        ("README.md", b"Mod\xe8le"),
    ],
)
def test_what_cannot_be_read_or_leads_out_of_the_folder_is_refused(model, name, content):
    if content == "a folder":
        (model / name).mkdir()
    elif content == "a link":
        (model.parent / "secret").write_text("{}")
        (model / name).symlink_to(model.parent / "secret")
    else:
        (model / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        read_side_files(open_checkpoint(model))


def test_what_was_read_does_not_change(model):
    (model / "modeling.py").write_text("before")
    files = read_side_files(open_checkpoint(model))
    (model / "modeling.py").write_text("after")
    assert files.copied["modeling.py"] == b"before"
    assert (files.record, files.card) == ({"format": 2}, "")
