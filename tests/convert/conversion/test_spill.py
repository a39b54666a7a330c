"""``--spill``: hidden states on disk, the same bytes in OUT."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion import memory
from kvfold.convert.conversion.journal import run_key
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.walk import passes
from kvfold.convert.walk.hidden import Spill

TARGETS: list[dict[str, Any]] = [
    {"to": "gqa", "kv_heads": 2, "group": "contiguous"},
    {"to": "mla", "kv_rank": 24, "rope_dim": 4, "refine": 1},
]


def request(tmp_path: Path, model: Path | None = None, **options: Any) -> ConvertRequest:
    text = {"samples": 4, "seq_len": 24, "quiet": True}
    return ConvertRequest(model=model or demo_folder(), **{"out": tmp_path / "out", "to": "mqa", **text, **options})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("target", TARGETS, ids=["gqa", "mla, refined"])
def test_out_is_the_same_and_nothing_has_a_name(
    target: dict[str, Any], tiny_reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks of two sequences. A file without a name is gone with its process, however that ends."""
    monkeypatch.setattr(passes, "_CPU_TOKENS", 48)
    folder, stored = tmp_path / "spill", []
    folder.mkdir()
    store = Spill.store

    def counted(self: Spill, chunk: Any) -> Any:
        stored.append(list(folder.iterdir()))
        return store(self, chunk)

    monkeypatch.setattr(Spill, "store", counted)
    convert_checkpoint(request(tmp_path, tiny_reader, out=tmp_path / "plain", **target))
    assert not stored
    convert_checkpoint(request(tmp_path, tiny_reader, spill=folder, **target))
    assert len(stored) > 40
    assert not any(stored)
    assert not list(folder.iterdir())
    assert files(tmp_path / "out") == files(tmp_path / "plain")


def test_a_folder_without_room_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(InputError) as caught:
            convert_checkpoint(request(tmp_path, **options))
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert f"--spill {tmp_path / 'none'}: no such folder to keep hidden states in" in refused(spill=tmp_path / "none")
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "too little disk space: hidden states need" in refused(spill=tmp_path)
    assert "has no hidden states to keep" in refused(spill=tmp_path, method="mean")


def test_a_run_resumes_with_another_spill(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(demo_folder()))
    plan = make_plan(request(tmp_path), checkpoint)
    assert run_key(replace(plan, request=request(tmp_path, spill=tmp_path))) == run_key(plan)
    checkpoint.close()
