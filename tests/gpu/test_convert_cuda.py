"""Calibrated conversions on a CUDA device end where those on a CPU do."""

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

pytestmark = pytest.mark.gpu


def test_trained_conversions(tmp_path):
    results = {}
    for device in ("cpu", "cuda"):
        request = ConvertRequest(
            model=str(demo_folder()),
            out=str(tmp_path / device),
            to="mla",
            kv_rank=24,
            rope_dim=8,
            method="svd",
            samples=4,
            seq_len=64,
            refine=2,
            polish=2,
            device=device,
            quiet=True,
        )
        results[device] = convert_checkpoint(request)
    assert results["cuda"].record["precision"]["held_out"] == "float32"
    assert results["cuda"].drift.kl == pytest.approx(results["cpu"].drift.kl, abs=0.005)
