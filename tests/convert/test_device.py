"""The dtype in which a checkpoint is computed."""

from dataclasses import dataclass, field

import pytest
import torch

from kvfold.convert import host
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.device import compute_dtype
from kvfold.convert.measure.drift import _stream


@dataclass
class Tensor:
    dtype: str
    nbytes: int


@dataclass
class Checkpoint:
    tensors: dict = field(default_factory=dict)


MIXED = Checkpoint({"a": Tensor("F32", 5), "b": Tensor("I64", 100), "c": Tensor("BF16", 4), "d": Tensor("BF16", 4)})


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "auto", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_precision(device, name, expected):
    assert compute_dtype(MIXED, torch.device(device), name) == expected


def test_whether_there_may_be_a_gpu_is_known_without_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host, "_DEVICES", tmp_path)
    (tmp_path / "nvme0").touch()
    assert not host.may_have_gpu()
    (tmp_path / "nvidia0").touch()
    assert host.may_have_gpu()


def test_a_model_alone_computes_its_logits_once(monkeypatch):
    from kvfold.attention.drift.compare import compare_predictions
    from kvfold.convert.walk.passes import embed

    stream = _stream(open_checkpoint(demo_folder()), torch.device("cpu"), "auto")
    tokens = torch.randint(0, 2048, (2, 16))
    states = embed(stream, tokens)
    copies = [state.clone() for state in states]
    both = compare_predictions(stream, stream, states, copies, [tokens])
    asked = []
    logits = stream.logits
    monkeypatch.setattr(stream, "logits", lambda hidden: asked.append(hidden.shape[1]) or logits(hidden))
    alone = compare_predictions(stream, stream, states, states, [tokens])
    assert asked.count(15) == 1
    assert alone == both
