"""A source that changes during a run gives an error and no OUT: its result would belong to neither version."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.errors import InputError

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tiny_family, tmp_path):
    return Path(shutil.copytree(tiny_family("llama"), tmp_path / "model"))


def replace_by_equal_layout(model):
    other = model.parent / "other"
    save_file({name: tensor + 1 for name, tensor in load_file(model / WEIGHTS).items()}, other, {"format": "pt"})
    os.replace(other, model / WEIGHTS)


def replace_by_longer_header(model):
    other = model.parent / "other"
    save_file(load_file(model / WEIGHTS), other, {"format": "pt", "note": "x" * 4096})
    os.replace(other, model / WEIGHTS)


def overwrite(model):
    with (model / WEIGHTS).open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


def link_elsewhere(model):
    secret = model.parent / "secret.json"
    secret.write_text("{}")
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to(secret)


def remove(model):
    (model / "generation_config.json").unlink()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replace_by_equal_layout, f"{WEIGHTS}: replaced by another file"),
        (replace_by_longer_header, f"{WEIGHTS}: replaced by another file"),
        (overwrite, f"{WEIGHTS}: written to"),
        (link_elsewhere, "generation_config.json: replaced by another file"),
        (remove, "generation_config.json: "),
    ],
)
def test_a_change_during_the_run(model, change, found):
    (model / "generation_config.json").write_text("{}")
    request = ConvertRequest(model=str(model), out=str(model.parent / "out"), to="mqa", method="mean")
    pending = [change]

    def progress(stage, done, total):
        if stage == "convert" and pending:
            pending.pop()(model)

    with pytest.raises(InputError) as raised:
        convert_checkpoint(request, progress)
    assert any(found in line for line in (raised.value.message, *raised.value.details))
    assert not list(model.parent.glob("*out*"))
