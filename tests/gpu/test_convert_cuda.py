"""Calibrated conversions on a CUDA device end where those on a CPU do."""

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{"method": "svd", "refine": 2, "polish": 2}, {}])
def test_trained_and_fitted_conversions(options, tmp_path):
    results = {}
    for device in ("cpu", "cuda"):
        request = ConvertRequest(
            model=str(demo_folder()),
            out=str(tmp_path / device),
            to="mla",
            kv_rank=24,
            rope_dim=8,
            samples=4,
            seq_len=64,
            device=device,
            quiet=True,
            **options,
        )
        results[device] = convert_checkpoint(request)
    assert results["cuda"].record["precision"]["held_out"] == "float32"
    assert results["cuda"].drift.kl == pytest.approx(results["cpu"].drift.kl, abs=0.005)
