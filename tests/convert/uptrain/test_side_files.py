"""Files beside the weights are read before the first step: a bad one must not cost the training, nor a link leak."""

import shutil
from pathlib import Path

import pytest

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain.run import read_side_files


@pytest.fixture
def model(tiny_family, tmp_path):
    return Path(shutil.copytree(tiny_family("llama"), tmp_path / "model"))


def refused(model):
    with pytest.raises(InputError) as raised:
        read_side_files(open_checkpoint(model))
    return raised.value.message


@pytest.mark.parametrize("name", ["README.md", "kvfold.json", "modeling.py"])
def test_links_out_of_the_folder(model, name):
    (model.parent / "secret").write_text("{}")
    (model / name).symlink_to(model.parent / "secret")
    assert name in refused(model)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}}', b"\xff{}"])
def test_a_record_that_is_no_object(model, content):
    (model / "kvfold.json").write_bytes(content)
    assert "kvfold.json" in refused(model)


def test_a_card_in_another_encoding_and_a_folder_with_the_name_of_a_python_file(model):
    (model / "README.md").write_bytes("# Modèle".encode("latin-1"))
    assert refused(model).endswith("README.md: byte 5 is not UTF-8; save it as UTF-8 or remove it")
    (model / "x.py").mkdir()
    assert "x.py" in refused(model)


def test_what_was_read_does_not_change(model):
    (model / "modeling.py").write_text("before")
    files = read_side_files(open_checkpoint(model))
    (model / "modeling.py").write_text("after")
    assert files.copied["modeling.py"] == b"before"
    assert (files.record, files.card) == ({"format": 2}, "")
