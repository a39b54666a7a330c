"""The Triton decode kernel, interpreted on a CPU, against float64.

The interpreter must be chosen before Triton is imported, so all cases run in one process of their
own.
"""

import json
from pathlib import Path

import pytest
from helpers.processes import run_python

pytest.importorskip("triton", minversion="3.9", reason="older interpreters fail with NumPy 2.4")
pytestmark = pytest.mark.slow

CASES = json.loads(Path(__file__).with_name("decode_kernel.json").read_text())

WORKER = """
import json, sys
import torch
from kvfold.attention.kernel import run_latent_kernel

def run(
    B=3, H=4, R=64, P=16, S=130, dtype="float16",
    splits=None, lengths=None, padding=None, strided=False, gain=1.0,
):
    torch.manual_seed(3)
    dtype = getattr(torch, dtype)
    query = torch.randn(B, H, 1, R).mul(gain).to(dtype)
    rope = torch.randn(B, H, 1, P).mul(gain).to(dtype)
    cache = torch.randn(B, S, R + P).to(dtype)
    latent = cache[..., :R]
    key = cache[..., R:]
    if not strided:
        latent = latent.contiguous()
        key = key.contiguous()
    scale = (R + P) ** -0.5
    slots = torch.arange(S)
    seen = slots >= torch.tensor(padding or [0] * B)[:, None]
    seen = seen & (slots < torch.tensor(lengths or [S] * B)[:, None])
    mask = seen if lengths or padding else None
    result = run_latent_kernel(query, rope, latent, key, scale, mask=mask, splits=splits)

    def formula(kind):
        c = latent.to(kind)
        score = query.to(kind) @ c[:, None].mT + rope.to(kind) @ key.to(kind)[:, None].mT
        score = scale * score.to(torch.promote_types(kind, torch.float32))
        weights = score.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        return weights.nan_to_num(0).to(kind) @ c[:, None]

    exact = formula(torch.float64)
    return {
        "finite": bool(result.isfinite().all()),
        "error": float((result.double() - exact).abs().max()),
        "naive": float((formula(dtype).double() - exact).abs().max()),
        "first": float(result[0].abs().max()),
    }

cases = json.load(sys.stdin)
print(json.dumps({name: run(**case) for name, case in cases.items()}))
"""


@pytest.fixture(scope="module")
def found():
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return json.loads(
        run_python("-c", WORKER, input=json.dumps(CASES), environment=environment).stdout
    )


@pytest.mark.parametrize("case", CASES)
def test_error_is_at_most_twice_that_of_the_naive_formula(found, case):
    result = found[case]
    assert result["finite"]
    assert result["error"] <= 2 * result["naive"]
    assert (result["first"] == 0) == (case == "sees-nothing")
