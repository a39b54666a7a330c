"""Calibrated conversions on a CUDA device end where those on a CPU do."""

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("train", ["attention", "norms", "all"])
def test_refined_and_polished_conversions(tmp_path, train):
    found = {}
    for device in ("cpu", "cuda"):
        request = ConvertRequest(
            model=str(demo_folder()), out=str(tmp_path / device), to="mla", kv_rank=24, rope_dim=8, samples=8,
            seq_len=128, refine=5, polish=10, train=train, device=device, quiet=True,
        )  # fmt: skip
        found[device] = convert_checkpoint(request)
    assert found["cuda"].record["precision"]["held_out"] == "float32"
    assert found["cuda"].drift.kl == pytest.approx(found["cpu"].drift.kl, abs=0.005)
