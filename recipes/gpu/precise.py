"""Stages that judge results: the tests marked gpu, every variant of attention against float64,
drift against the CPU's.

A row with ``right: false`` is a wrong result.
"""

import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as tree
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import bench_latent_cache
import torch
from gpu.card import ROOT, Check
from helpers.attention import Case, error, gpu_rounding, naive, naive_latent, small_modules
from measured import Row
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention import grouped_attention, latent_attention
from kvfold.convert import drift_checkpoints
from kvfold.convert.data import read_text
from kvfold.convert.measure.losses import token_windows
from kvfold.convert.request import DriftRequest

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Calls = tuple[Callable[..., Tensor], Callable[..., Tensor]]
Masks = Mapping[str, Any]
# As in the tests: errors may be twice those of the formula written out in the same precision, or of
# rounding.
FACTOR = 2
MOST_KL = 1e-4
# Without a card the tests marked gpu are only imported; others stand for them, so that there is
# something to count.
REHEARSED = "tests/attention/test_latent_decode.py"


def tests(check: Check) -> Iterator[Row]:
    """The tests marked gpu, a process for each file: counts, then a row for each failure.

    Files are those that have the mark, so that not the whole suite is imported, kernels and
    conversions first.
    """
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    files = sorted(
        files, key=lambda path: ("kernel" not in path.name, "convert" not in path.name, path)
    )
    for file in [*files, ROOT / REHEARSED] if check.rehearse else files:
        yield from _tests(check, file)


def _tests(check: Check, file: Path) -> Iterator[Row]:
    report = check.work / f"{file.stem}.xml"
    marked = [] if file == ROOT / REHEARSED else ["-m", "gpu"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *marked,
    ]
    process = subprocess.Popen(
        [*command, str(file)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stopped = False
    try:
        output = process.communicate(timeout=max(1.0, check.left - 10))[0]
    except subprocess.TimeoutExpired:
        # As by Ctrl-C: pytest then still writes what was found so far.
        process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
        stopped = True
    # 5: no test was selected, as everywhere without a card.
    if not report.exists() or not (stopped or process.returncode in (0, 1, 5)):
        yield {
            "file": file.name,
            "failed": f"pytest ended with status {process.returncode}: {output[-2000:]}",
        }
        return
    cases = list(tree.parse(report).iter("testcase"))
    wrong = [(case, each) for case in cases for each in case if each.tag in ("failure", "error")]
    left_out = re.search(r"(\d+) deselected", output)
    yield {
        "file": file.name,
        "tests": len(cases),
        "wrong": len(wrong),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "deselected": int(left_out[1]) if left_out else 0,
        "right": not wrong,
        **({"failed": "out of time: the tests after these did not run"} if stopped else {}),
    }
    for case, each in wrong:
        name = f"{case.get('classname')}.{case.get('name')}"
        yield {"test": name, "why": (each.text or "")[-1500:], "right": False}


def attention(check: Check) -> Iterator[Row]:
    """Errors of every variant in every dtype, forward, backward and over a cache, next to the plain
    formula's.
    """
    torch.manual_seed(0)
    for dtype in DTYPES:
        for queries in ("all", 5, 1):
            for variant, calls, inputs, options in _variants(check, dtype, queries):
                mask = "none" if "causal" in options else next(iter(options), "causal")
                about = {
                    "variant": variant,
                    "dtype": str(dtype)[6:],
                    "queries": queries,
                    "mask": mask,
                }
                yield from _judged(about, calls, inputs, options)
        yield from _cached_modules(check, dtype)


def _variants(
    check: Check, dtype: torch.dtype, queries: int | str
) -> Iterator[tuple[str, Calls, list[Tensor], Masks]]:
    """Every variant: the fast path and the formula, inputs ``[B, H, T, D]`` on ``S`` slots, and the
    mask's options.

    With ``queries`` 1 or 5, these follow the slots of a padded cache.
    """
    batch, heads, slots, dim, rank, rope = (
        (2, 4, 24, 16, 32, 8) if check.rehearse else (2, 16, 512, 128, 512, 64)
    )
    count = slots if queries == "all" else int(queries)
    starts = torch.tensor([0, slots // 3], device=check.device)
    masks: list[Masks] = [{}, {"starts": starts}, {"lengths": slots - starts}]
    if queries == "all":
        masks = [{}, {"window": slots // 4}, {"causal": False}]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(check.device, dtype)

    for groups in (heads, heads // 4, 1):
        inputs = [
            random(batch, heads, count, dim),
            *(random(batch, groups, slots, dim) for _ in range(2)),
        ]
        name = {heads: "MHA", 1: "MQA"}.get(groups, f"GQA-{groups}")
        bias = {"bias": random(1, heads, count, slots)}
        yield from (
            (name, (grouped_attention, naive), inputs, options) for options in (*masks, bias)
        )
    shapes = (batch, heads, count, dim), (batch, heads, count, rope), (batch, slots, rank + rope)
    inputs = [
        *(random(*shape) for shape in shapes),
        *(random(heads, dim, rank) / rank**0.5 for _ in range(2)),
    ]
    for form in ("explicit", "absorbed"):
        absorbed = form == "absorbed"
        calls = (
            partial(latent_attention, absorbed=absorbed),
            partial(naive_latent, absorbed=absorbed),
        )
        yield from ((f"MLA {form}", calls, inputs, options) for options in masks)


def _judged(about: Row, calls: Calls, inputs: list[Tensor], options: Masks) -> Iterator[Row]:
    """The row of a result, and where all queries are there that of its gradients."""
    case = Case(
        **{
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
    )
    fast = partial(calls[0], **options)
    plain = lambda *x: calls[1](*x, case=case)
    runs = (fast, inputs), (plain, inputs), (plain, [each.double() for each in inputs])
    with torch.no_grad():
        results = [call(*given) for call, given in runs]
    yield compared({**about, "pass": "forward"}, *([each] for each in results))
    if about["queries"] == "all":
        probe = torch.randn(results[0].shape, device=results[0].device)
        yield compared({**about, "pass": "backward"}, *(_gradients(*run, probe) for run in runs))


def _gradients(call: Callable[..., Tensor], inputs: list[Tensor], probe: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    return list(torch.autograd.grad(call(*leaves), leaves, probe.to(inputs[0].dtype)))


def compared(about: Row, found: list[Tensor], formula: list[Tensor], exact: list[Tensor]) -> Row:
    """The largest error relative to that of the formula in the same dtype, or of rounding where
    larger.
    """
    pairs = []
    for ours, plain, true in zip(found, formula, exact, strict=True):
        true = true.detach().cpu()
        rounding = max(error(true.to(ours.dtype), true), gpu_rounding(ours, true))
        pairs.append((error(ours, true), max(error(plain, true), rounding)))
    worst = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
    right = all(ours <= FACTOR * plain for ours, plain in pairs)
    row = {
        **about,
        "error": worst[0],
        "error_of_formula": worst[1],
        "error_over_formula": worst[0] / (worst[1] or 1),
    }
    return {**row, "right": right}


@torch.no_grad()
def _cached_modules(check: Check, dtype: torch.dtype) -> Iterator[Row]:
    """The modules with caches, a prefill and single tokens, against the same modules without a
    cache.
    """
    for variant, module in small_modules().items():
        wide = small_modules()[variant].double()
        x = torch.randn(2, 24, 64).to(dtype)
        module = module.to(dtype)
        wide.load_state_dict(
            {name: weight.double() for name, weight in module.state_dict().items()}
        )
        module = module.to(check.device)
        x = x.to(check.device)
        cache = module.new_cache(2, 24, growing=False, dtype=dtype, device=check.device)
        parts = [
            module(x[:, :20], cache=cache),
            *(module(x[:, t : t + 1], cache=cache) for t in range(20, 24)),
        ]
        about = {
            "variant": f"{variant} module",
            "dtype": str(dtype)[6:],
            "queries": "20, then 1",
            "mask": "",
        }
        exact = wide(x.cpu().double())
        yield compared({**about, "pass": "cached"}, [torch.cat(parts, 1)], [module(x)], [exact])


def drift(check: Check) -> Iterator[Row]:
    """Drift of a converted checkpoint on the device against the CPU's, layer by layer, and of FP8
    and INT8 caches.
    """
    # Without fits, which take longer than all that is judged here.
    rank, rope = check.splits[0]
    check.convert("drift", device="cpu", to="mla", kv_rank=rank, rope_dim=rope, method="svd")
    out = check.work / "drift"
    sizes = {"samples": 2, "seq_len": 32} if check.rehearse else {"samples": 16, "seq_len": 256}
    places = (("cpu", "float32"), (check.device.type, "float32"), (check.device.type, "bfloat16"))
    reports = {}
    for device, dtype in places:
        request = DriftRequest(
            str(check.model), str(out), device=device, dtype=dtype, quiet=True, **sizes
        )
        reports[device, dtype] = report = drift_checkpoints(request)
        on_cpu = reports["cpu", "float32"]
        apart = report.kl - on_cpu.kl
        floor = report.floor and report.floor.measured.kl
        both = zip(on_cpu.measured.layers, report.measured.layers, strict=True)
        errors = [(cpu.residual_propagated, here.residual_propagated) for cpu, here in both]
        row = {
            "device": device,
            "dtype": dtype,
            "kl": report.kl,
            "kl_minus_cpu": apart,
            "excess": report.excess,
        }
        row |= {"floor_kl": floor, "residual_of_layers_on_cpu_and_here": errors}
        yield {**row, "right": abs(apart) <= MOST_KL} if dtype == "float32" else row
    count = 2 if check.rehearse else 16
    windows = token_windows(
        AutoTokenizer.from_pretrained(out), read_text("held_out"), count, sizes["seq_len"]
    )
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for device in ("cpu", check.device.type):
        here = model.to(device), windows.to(device)
        yield {"device": device, **bench_latent_cache.measured(*here, out, "as stored")}
