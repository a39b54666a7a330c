"""Files that no trainer writes: each is refused before any work, in words, at the cost of reading
it once.
"""

import os
import resource
from pathlib import Path

import pytest

from kvfold.convert.checkpoint.files import parse_json_object
from kvfold.convert.checkpoint.writer import PlannedTensor, ShardWriter, assign_shards
from kvfold.convert.recipes import read_recipe


def test_pairs_of_halves_are_characters():
    value = parse_json_object(Path("c"), b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}')
    assert value == {"a": "\U0001f600", "b": "\\ud800"}


def test_a_model_of_more_shards_than_a_process_may_open(tmp_path):
    count = 60
    shards = assign_shards([PlannedTensor(f"t{i}", "F32", (1,), None) for i in range(count)], 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1]))
    try:
        ShardWriter(tmp_path, shards).sync()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.iterdir())) == count


def test_a_shard_that_became_a_link_is_not_written_through(tmp_path):
    shards = assign_shards([PlannedTensor("t", "F32", (1,), None)], 100)
    writer = ShardWriter(tmp_path, shards)
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("secret")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        writer.sync()


def test_recipes_that_never_end(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "zero", "large"):
        with refused():
            read_recipe(str(tmp_path / f"{name}.toml"))
