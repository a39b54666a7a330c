"""recipes/quantize.py on results: what writes or reads a latent keeps its bytes, the rest is quantized."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.checkpoints import tensors

from kvfold.convert.data import read_text

SCRIPT = Path(__file__).parents[2] / "recipes" / "quantize.py"
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "kv_a_layernorm")


def test_the_latent_projections_are_left_alone(
    made: Callable[[str], Path], python_with: Callable[[str], str], tmp_path: Path
) -> None:
    python, text = python_with("KVFOLD_QUANTIZE_PYTHON"), tmp_path / "text.txt"
    text.write_text(read_text("held_out")[:30000])
    kl = {}
    for options in ((), ("--all",)):
        out = tmp_path / f"quantized{len(options)}"
        call = [python, SCRIPT, made("mla-free"), out, "--scheme", "W8A8", "--text", text, *options]
        done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        kl[options] = float(re.search(r"KL (\S+) nats", done.stdout)[1])
    assert kl[()] < 0.01
    assert kl[("--all",)] > 1
    before, after = tensors(made("mla-free")), tensors(tmp_path / "quantized0")
    kept = [name for name in before if name.split(".")[-2] in LATENT]
    assert len(kept) == 4 * 4  # with the bias of kv_a_proj_with_mqa
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert after["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
