"""The KL of a polished model as each tuned constant of polishing moves: where their comments get
their figures.

    python recipes/benchmarks/bench_polish_constants.py [--only BETAS] [--steps 60] python
    recipes/benchmarks/bench_polish_constants.py --model SMOLLM2 --calibration FILE --only _RATE
    --steps 100

converts the model that ships (unrefined to MLA 24+8; refined to MLA 40+24, which is close to it
already), or MODEL to MLA 128+64, then trains all attention of each together with every constant at
a few values, the one in the code among them. Batches of other sizes get as many tokens, in more or
fewer steps. It prints the KL from the source (nats per token) on held-out sequences before, after
every 25 steps and after the last, and CPU seconds of one core.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.polishing import taught_text
from kvfold.convert.data import demo_folder
from kvfold.convert.device import training_autocast
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.tokenizer import load_tokenizer
from kvfold.convert.text.windows import load_calibration
from kvfold.convert.training import budget, fit, polish
from kvfold.convert.training.steps import has_constant

TEXT = {"samples": 96, "seq_len": 128}
RUNS: dict[str, dict[str, Any]] = {
    "MLA 24+8": {"to": "mla", "kv_rank": 24, "rope_dim": 8, **TEXT},
    "MLA 40+24, refined": {"to": "mla", "kv_rank": 40, "rope_dim": 24, "refine": 40, **TEXT},
}
LARGER_TEXT = {"samples": 512, "seq_len": 256}
LARGER_RUNS: dict[str, dict[str, Any]] = {
    "MLA 128+64": {"to": "mla", "kv_rank": 128, "rope_dim": 64, "samples": 64, "seq_len": 256}
}
CONSTANTS: list[tuple[Any, str, list[Any]]] = [
    (polish, "_RATE", [0.3, 1.2, 2.4, 4.8]),
    (budget, "BATCH_TOKENS", [256, 512, 1024, 2048]),
    (fit, "BETAS", [(0.9, 0.95), (0.9, 0.99), (0.95, 0.99)]),
    (polish, "_WARMUP", [1, 10]),
    (polish, "_MIN_GAIN", [0.0, 0.01]),  # parts of more than one round need more than 200 steps
]


def prepared(
    model: Path, calibration: str | None, text: dict[str, int], options: dict[str, Any], place: Path
) -> tuple[Callable[[], polish.ModelTrainee], polish.TrainingText, polish.Text]:
    """A maker of a converted model to polish, and ``text``'s calibration and held-out sequences."""
    texts = [*filter(None, [calibration]), "self:0"]  # constants were measured on prose
    convert_checkpoint(
        ConvertRequest(model=str(model), out=str(place), calibration=texts, quiet=True, **options)
    )
    source = open_checkpoint(model)
    written = open_checkpoint(place)
    stream = CheckpointStream(source.config, source.read, list(source.tensors))
    tokens = load_calibration(calibration, load_tokenizer(source, False, "calibration"), **text)
    device = torch.device("cpu")
    autocast = training_autocast(written, device)
    stored = dict.fromkeys(written.tensors, torch.bfloat16)
    attention = [name for name in written.tensors if ".self_attn." in name]

    def make() -> polish.ModelTrainee:
        constant = has_constant(written)
        return polish.ModelTrainee(
            written.config, written.read, stored, attention, device, autocast, constant=constant
        )

    training, held_out = (
        taught_text(stream, part, autocast) for part in (tokens.calibration, tokens.held_out)
    )
    return (
        make,
        polish.TrainingText(training.tokens, lambda indices: training.states[indices]),
        held_out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="constants whose name contains this")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--samples", type=int, help="sequences to train on; default: 96 of 128 tokens"
    )
    parser.add_argument("--model", type=Path, help="default: the model that ships")
    parser.add_argument("--calibration", help="text for --model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = arguments.model or demo_folder()
    text = dict(LARGER_TEXT if arguments.model else TEXT)
    if arguments.samples is not None:
        text["samples"] = arguments.samples
    for run, options in (LARGER_RUNS if arguments.model else RUNS).items():
        with tempfile.TemporaryDirectory() as place:
            make, training, held_out = prepared(
                model, arguments.calibration, text, options, Path(place) / "out"
            )
            for module, name, values in (row for row in CONSTANTS if arguments.only in row[1]):
                usual = getattr(module, name)
                for value in values:
                    setattr(module, name, value)
                    steps = (
                        arguments.steps * usual // value
                        if name == "BATCH_TOKENS"
                        else arguments.steps
                    )
                    started = time.process_time()
                    found = polish.polish(make(), training, held_out, steps).errors
                    mark = "*" if value == usual else " "
                    seconds = time.process_time() - started
                    course = " -> ".join(f"{kl:.4f}" for kl in found)
                    print(
                        f"{run:20} {name:15} {value!s:>12}{mark} KL {course}  {seconds:.0f} s",
                        flush=True,
                    )
                setattr(module, name, usual)


if __name__ == "__main__":
    main()
