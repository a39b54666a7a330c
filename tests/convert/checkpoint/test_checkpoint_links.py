"""Links and paths: a hub cache's own are followed, whatever else leaves the checkpoint is refused."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError

FILES = ["config.json", "model.safetensors", "tokenizer.json"]


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": torch.arange(3.0)}, folder / "model.safetensors")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot as the hub's library makes it: relative links into the blobs of the same model."""
    root = tmp_path / "models--team--tiny"
    fill(root / "blobs")
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in FILES:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_snapshot_of_a_hub_cache(snapshot: Path) -> None:
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.read("w").tolist() == [0, 1, 2]
    assert checkpoint.extra_files() == [snapshot / "tokenizer.json"]


def test_a_link_to_the_whole_checkpoint(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "shortcut").symlink_to(snapshot)
    assert open_checkpoint(tmp_path / "shortcut").read("w").tolist() == [0, 1, 2]


def test_links_inside_the_folder(tmp_path: Path) -> None:
    fill(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights")
    (tmp_path / "model" / "model.safetensors").symlink_to("weights")
    assert open_checkpoint(tmp_path / "model").read("w").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["snapshot", "folder"])
def test_links_that_leave_the_checkpoint(snapshot: Path, tmp_path: Path, kind: str, name: str) -> None:
    """The blobs of another model's cache are elsewhere too."""
    model, other = (snapshot, tmp_path / "models--team--other" / "blobs")
    if kind == "folder":
        model, other = tmp_path / "model", tmp_path / "elsewhere"
        fill(model)
    fill(other)
    (model / name).unlink()
    (model / name).symlink_to(other / name)
    expected = f"{model / name}: a link that leaves the checkpoint, to {other / name}; put the file itself there"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        open_checkpoint(model)


def test_links_of_files_that_are_not_used_do_not_matter(tmp_path: Path) -> None:
    fill(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").symlink_to("/etc/hostname")
    assert open_checkpoint(tmp_path / "model").read("w").tolist() == [0, 1, 2]


def test_a_dangling_link_and_a_pipe(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'tokenizer.json'}: expected a regular file, found something else",
        f"  {tmp_path}: expected the file model.safetensors, found none; fetch it again",
    ]


@pytest.mark.parametrize(
    "path", ["../elsewhere/model.safetensors", "sub/../../elsewhere/model.safetensors", "ABSOLUTE"]
)
def test_index_entries_that_leave_the_folder(tmp_path: Path, path: str) -> None:
    fill(tmp_path / "model")
    fill(tmp_path / "elsewhere")
    (tmp_path / "model" / "model.safetensors").unlink()
    path = str(tmp_path / "elsewhere" / "model.safetensors") if path == "ABSOLUTE" else path
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": path}}))
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path / "model")
    expected = f"{tmp_path / 'model'}: expected a file inside this folder, found the path {path!r}, which leaves it"
    assert str(caught.value) == expected


def test_index_entries_in_a_folder_below(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "weights" / "a.safetensors")
    index = {"weight_map": {"w": "weights/a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).read("w").tolist() == [0, 1, 2]
