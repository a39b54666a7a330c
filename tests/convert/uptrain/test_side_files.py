"""Files beside the weights are read before the first step: a bad one must not cost the training, nor a link leak."""

import shutil
from pathlib import Path

import pytest

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain.output import read_side_files
from kvfold.convert.uptrain.request import UptrainRequest


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


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b'{"a": 1}}', b"\xff{}", b"1", b"[" * 100_000])
def test_a_record_that_is_no_object(model, content):
    (model / "kvfold.json").write_bytes(content)
    assert "kvfold.json: expected" in refused(model)


def test_a_card_in_another_encoding(model):
    (model / "README.md").write_bytes("# Modèle".encode("latin-1"))
    assert refused(model).endswith("save it as UTF-8 or remove it")


def test_a_folder_with_the_name_of_a_python_file(model):
    (model / "x.py").mkdir()
    assert "x.py" in refused(model)


def test_what_is_written_is_what_was_read(model, tmp_path):
    (model / "modeling.py").write_text("before")
    files = read_side_files(open_checkpoint(model))
    (model / "modeling.py").write_text("after")
    files.write(tmp_path)
    assert (tmp_path / "modeling.py").read_text() == "before"
    assert files.record == {"format": 2}
    assert files.card is None


def test_a_shard_size_that_is_none():
    with pytest.raises(InputError, match=r"--max-shard-size must be a size such as 5GB, 500MB or 2GiB, not 'x'"):
        UptrainRequest(model="a", out="b", text="c", max_shard_size="x")
