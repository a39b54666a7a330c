"""The KL of a polished model as each tuned constant of polishing moves: where their comments get their figures.

    python recipes/benchmarks/bench_polish_constants.py [--only _BETAS] [--steps 60]

converts the model that ships (unrefined to MLA 24+8; refined to MLA 40+24, which is close to it already), then trains
all attention of each together with every constant at a few values, the one in the code among them. It prints the KL
from the source (nats per token) on held-out sequences before and after, and CPU seconds of one core.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.conversion import polishing
from kvfold.convert.data import demo_folder
from kvfold.convert.device import training_autocast
from kvfold.convert.io.checkpoint import open_checkpoint
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.tokenizer import load_tokenizer
from kvfold.convert.text.windows import load_calibration
from kvfold.convert.training import budget, polish
from kvfold.convert.training.constant import has_constant
from kvfold.convert.training.student import Student

TEXT: dict[str, int] = {"samples": 96, "seq_len": 128}
RUNS: dict[str, dict[str, Any]] = {
    "MLA 24+8": {"to": "mla", "kv_rank": 24, "rope_dim": 8, **TEXT},
    "MLA 40+24, refined": {"to": "mla", "kv_rank": 40, "rope_dim": 24, "refine": 40, **TEXT},
}
CONSTANTS: list[tuple[Any, str, list[Any]]] = [
    (polish, "_RATE", [0.3, 1.2, 2.4, 4.8]),
    (budget, "BATCH_TOKENS", [512, 1024, 2048]),
    (polish, "_BETAS", [(0.9, 0.95), (0.9, 0.99), (0.95, 0.99)]),
    (polish, "_WARMUP", [1, 10]),
]


def prepared(options: dict[str, Any], place: Path) -> tuple[Student, polish.Text, polish.Text]:
    """A converted model to polish, and the calibration and held-out sequences of its conversion."""
    convert_checkpoint(ConvertRequest(model=str(demo_folder()), out=str(place), quiet=True, **options))
    source, written = open_checkpoint(demo_folder()), open_checkpoint(place)
    stream = CheckpointStream(source.config, source.read, list(source.tensors))
    tokens = load_calibration(None, load_tokenizer(source, False, "calibration"), TEXT["samples"], TEXT["seq_len"])
    device = torch.device("cpu")
    autocast = training_autocast(written, device)
    trained = {name: torch.bfloat16 for name in written.tensors if ".self_attn." in name}
    student = Student(
        written.config, written.read, written.tensors, trained, device, autocast, constant=has_constant(written)
    )
    training, held_out = (polishing._text(stream, part, autocast) for part in (tokens.calibration, tokens.held_out))
    return student, training, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="constants whose name contains this")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for run, options in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            student, training, held_out = prepared(options, Path(place) / "out")
            start = {name: part.master.detach().clone() for name, part in student.trained.items()}
            for module, name, values in (row for row in CONSTANTS if arguments.only in row[1]):
                usual = getattr(module, name)
                for value in values:
                    setattr(module, name, value)
                    student.put(start)
                    started = time.process_time()
                    found = polish.polish(student, training, held_out, arguments.steps).errors
                    mark, seconds = "*" if value == usual else " ", time.process_time() - started
                    print(
                        f"{run:20} {name:15} {value!s:>12}{mark} KL {found[0]:.4f} -> {found[-1]:.4f}  {seconds:.0f} s",
                        flush=True,
                    )
                setattr(module, name, usual)


if __name__ == "__main__":
    main()
