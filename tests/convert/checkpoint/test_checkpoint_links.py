"""Links and paths: a hub cache's own are followed; what leaves the checkpoint is refused."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from kvfold.convert.checkpoint.digests import find_changed_files
from kvfold.convert.checkpoint.files import list_files_besides_weights
from kvfold.convert.checkpoint.opening import open_checkpoint

FILES = ["config.json", "model.safetensors", "tokenizer.json", "README.md"]


def fill(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    save_file({"w": torch.arange(3.0)}, folder / "model.safetensors")


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot as the hub's library makes it: relative links into the blobs of the same model."""
    root = tmp_path / "models--team--tiny"
    fill(root / "blobs")
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in FILES:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_snapshot_of_a_hub_cache_and_a_link_to_it(snapshot, tmp_path):
    (tmp_path / "shortcut").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "shortcut"):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.origin == "team/tiny@0123"
        assert checkpoint.read_tensor("w").tolist() == [0, 1, 2]
        assert list_files_besides_weights(checkpoint.folder) == ["tokenizer.json"]


def test_links_and_index_entries_inside_the_folder(tmp_path):
    fill(tmp_path / "model")
    model = tmp_path / "model"
    (model / "below").mkdir()
    (model / "model.safetensors").rename(model / "below" / "weights")
    (model / "model.safetensors").symlink_to("below/weights")
    (model / "photo.png").symlink_to("/etc/hostname")  # not used, so that it does not matter
    assert open_checkpoint(model).read_tensor("w").tolist() == [0, 1, 2]
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "below/weights"}})
    )
    assert open_checkpoint(model).read_tensor("w").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["snapshot", "folder"])
def test_links_that_leave_the_checkpoint(snapshot, tmp_path, kind, name, refused):
    """The blobs of another model's cache are elsewhere too."""
    model = snapshot
    other = tmp_path / "models--team--other" / "blobs"
    if kind == "folder":
        model = tmp_path / "model"
        other = tmp_path / "elsewhere"
        fill(model)
    fill(other)
    (model / name).unlink()
    (model / name).symlink_to(other / name)
    with refused():
        open_checkpoint(model)


@pytest.mark.parametrize(
    "path",
    [
        "../elsewhere/model.safetensors",
        "TMP",
        "a" * 300,
        "a\0b",
        "circle",
    ],
    ids=["above", "absolute", "long", "nul", "circle"],
)
def test_index_entries_that_leave_the_folder_or_cannot_be_files(tmp_path, path, refused):
    fill(tmp_path / "model")
    fill(tmp_path / "elsewhere")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "circle").symlink_to("circle")
    path = path.replace("TMP", str(tmp_path / "elsewhere" / "model.safetensors"))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": path}})
    )
    with refused():
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "additional_chat_templates/a.jinja",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_every_file_is_regular_and_of_a_sensible_size(tmp_path, name, kind, refused):
    fill(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as sparse:
            sparse.truncate(8 << 30)
    with refused():
        open_checkpoint(tmp_path)


def test_a_link_to_a_folder_is_no_part_of_a_result(tmp_path, out):
    (out / "sub").mkdir(parents=True)
    (out / "elsewhere").symlink_to("/etc")
    (out / "sub" / "above").symlink_to(tmp_path)
    names = ["elsewhere", "sub/above"]
    assert list(find_changed_files(out, {})) == [
        f"{name}: kvfold did not write this file" for name in names
    ]
