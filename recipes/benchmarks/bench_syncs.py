"""How often a conversion waits for its device: synchronizations per layer, by the line of code that
causes them.

    python recipes/benchmarks/bench_syncs.py [MODEL] [--device cuda] [--steps 10]

On CUDA torch itself reports them (`torch.cuda.set_sync_debug_mode`). On a CPU, where nothing waits,
every call counts that would wait if its tensor were on a card: reading a number (`item`, `float`,
`bool`, `tolist`), a copy to the CPU, `nonzero` and boolean indices, and decompositions, which check
their result. That is an upper bound, because tensors that are on the CPU in any case count too;
what is always there, fits (`transforms`) and files (`checkpoint`), is counted apart.
"""

import argparse
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import kvfold.attention
import kvfold.convert
from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder

FOLDERS = [
    str(Path(str(package.__file__)).parent) for package in (kvfold.attention, kvfold.convert)
]
APART = {"fits": "convert/transforms/", "files": "convert/checkpoint/"}
READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.cpu,
}
READS |= {Tensor.nonzero, torch.nonzero, torch.bincount, Tensor.numpy, Tensor.masked_select}
SOLVERS = {
    torch.linalg.eigh,
    torch.linalg.eigvalsh,
    torch.linalg.solve,
    torch.linalg.svd,
    torch.linalg.cholesky,
}
SOLVERS |= {torch.linalg.inv, torch.linalg.qr, torch.linalg.lstsq}
# "file:line what": how often
Places = Counter[str]


class _Reads(TorchFunctionMode):
    """Counts the calls that would wait for a device."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        masks = function is Tensor.__getitem__ and any(
            isinstance(each, Tensor) and each.dtype == torch.bool
            for each in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        moves = function is Tensor.to and "cpu" in args[1:2]
        if function in READS or function in SOLVERS or masks or moves:
            self._places[f"{caller()} {getattr(function, '__name__', function)}"] += 1
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """The innermost line of this repository's packages on the stack, as ``file:line``."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        for folder in FOLDERS:
            if frame.filename.startswith(folder):
                return f"{Path(frame.filename).relative_to(Path(folder).parent)}:{frame.lineno}"
    return "elsewhere"


@contextmanager
def counted(device: torch.device) -> Iterator[Places]:
    """Count synchronizations within the block by line."""
    places: Places = Counter()
    if device.type != "cuda":
        with _Reads(places):
            yield places
        return

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            places[caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def per_layer(places: Places, layers: int) -> dict[str, float]:
    """Per layer: ``all`` that may wait for the device, those of each part that never does, and the
    most frequent.
    """
    parts = {
        name: Counter({at: n for at, n in places.items() if at.startswith(where)})
        for name, where in APART.items()
    }
    others = places - sum(parts.values(), Counter())
    counts = (
        {"all": others.total()}
        | {name: part.total() for name, part in parts.items()}
        | dict(others.most_common(12))
    )
    return {name: round(count / layers, 1) for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", type=Path, default=demo_folder(), help="default: the model that ships"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=0, help="of refining each layer, and of polishing"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="of the model, by which counts are divided"
    )
    chosen = parser.parse_args()
    for options in (
        {"to": "mla", "kv_rank": 24, "rope_dim": 8},
        {"to": "gqa", "kv_heads": 2},
        {"to": "mqa"},
    ):
        with tempfile.TemporaryDirectory() as work, counted(torch.device(chosen.device)) as places:
            request = ConvertRequest(
                model=str(chosen.model), out=f"{work}/out", samples=chosen.samples, seq_len=chosen.seq_len, quiet=True,
                device=chosen.device, refine=chosen.steps, polish=chosen.steps, **options,
            )  # fmt: skip
            convert_checkpoint(request)
        print(options)
        for place, count in per_layer(places, chosen.layers).items():
            print(f"{count:9.1f}  {place}")


if __name__ == "__main__":
    main()
