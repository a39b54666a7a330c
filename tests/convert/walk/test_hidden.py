"""Hidden states in a file act as those in memory do, and leave nothing behind."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.walk import hidden
from kvfold.convert.walk.hidden import Spill, sequence


def chunks(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Seven sequences of five tokens, three at a time."""
    return list(torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0)).to(dtype).split(3))


def same(found: hidden.Hidden, expected: hidden.Hidden) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_spill_acts_as_a_list(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = chunks(dtype)
    with Spill(tmp_path) as keep:
        states = keep(expected)
        assert not list(tmp_path.iterdir()), "the file has a name"
        assert same(states, expected)
        assert all(torch.equal(sequence(states, i), sequence(expected, i)) for i in range(7))
        before = states[:]
        states[1] = -states[1]
        assert same(before, expected), "a copy changed with the states"
        expected[1] = -expected[1]
        assert same(states, expected)
        more = states[:0]
        more.append(states[2].mT)  # not contiguous
        assert torch.equal(more[0], expected[2].mT)
        assert len(states) == 3


def test_places_that_nothing_refers_to_are_used_again(tmp_path: Path) -> None:
    with Spill(tmp_path) as keep:
        states = keep(chunks())
        for _ in range(5):
            for index, chunk in enumerate(states):
                states[index] = chunk + 1
        size = os.fstat(keep._file.fileno()).st_size
        assert (
            size
            <= sum(chunk.nbytes for chunk in chunks()) + chunks()[0].nbytes + chunks()[-1].nbytes
        )
        assert same(states, [chunk + 1 + 1 + 1 + 1 + 1 for chunk in chunks()])


def test_a_full_disk_and_a_missing_folder_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError, match=f"--spill {tmp_path}/none must be a writable folder .No such"
    ):
        Spill(tmp_path / "none")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hidden, "write_all", full)
    with (
        Spill(tmp_path) as keep,
        pytest.raises(KvfoldError, match=f"--spill {tmp_path}: .* .No space left on device.; free"),
    ):
        keep(chunks())
