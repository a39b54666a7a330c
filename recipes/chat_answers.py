"""What a small chat model answers after conversions with and without dialogues in their calibration
text.

    python recipes/real_models.py checkpoint SMOLLM2 python recipes/chat_answers.py SMOLLM2
    --calibration FILE --work DIR --json recipes/results/chat_answers.json \
        --page docs/chat.md

Each row has the greedy answers of one model to twenty fixed instructions. Those of conversions also
have the KL and the excess loss on dialogues that SmolLM2 wrote with a seed that no conversion uses,
and on the held-out text FILE2 of --text. Conversions are kept in DIR and rows that the JSON file
holds are not measured again. The page is docs/chat.md.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from evidence import FIT
from measured import commit, conditions, continue_rows  # evidence.py adds benchmarks/ to the path
from real_models import TARGETS, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention import absorb, measure_drift
from kvfold.convert.measure.replies import Prompt, prompt_tokens, write_replies
from kvfold.convert.text.self_written import turns_of, write_sequences
from kvfold.convert.text.windows import load_calibration

BLENDS = {"prose and dialogues": (), "prose": ("--calibration", "self:0")}
CHOSEN = (
    "MLA 64+64",
    "MLA 128+64",
)  # a third and half of 384 KV-cache elements per token per layer
# of dialogues: as many as a conversion with FIT writes, with another seed
SEQUENCES = 24
SEED = 1
WINDOWS = 8  # of them, and of prose, that losses are measured on
LONGEST = 40  # tokens of an answer
INSTRUCTIONS = (
    "Write a short e-mail to my boss to ask for Friday off.",
    "What is the capital of France?",
    "Explain what photosynthesis is in two sentences.",
    "Give me three tips for sleeping better.",
    "Translate to Spanish: Good morning, my friend.",
    "Write a haiku about autumn.",
    "What is 12 plus 7?",
    "List the days of the week.",
    (
        "Summarize in one sentence: The cat sat on the mat because it was warm, and it slept there"
        " until dinner."
    ),
    "What should I cook with eggs, cheese and spinach?",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "How do I boil an egg?",
    "Name five animals that live in the sea.",
    "Is the sun a star or a planet?",
    "Suggest a name for a coffee shop and say why it fits.",
    "Rewrite politely: Send me the report now.",
    "What is the opposite of hot?",
    "Tell me a joke about computers.",
    "Why should people learn to swim?",
)


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``done`` lacks: the source, then each target with each calibration text."""
    known = {(row["target"], row["calibration"]) for row in done}
    pairs = [(target, blend) for target in args.targets for blend in BLENDS]
    if known >= {("source", ""), *pairs}:
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    source = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    length = int(FIT[-1])
    started = time.process_time()
    dialogues = write_sequences(
        source, turns_of(tokenizer, str(args.model)), SEQUENCES, length, SEED
    )
    writing = {
        "dialogues": list(dialogues.shape),
        "writing_cpu_seconds": round(time.process_time() - started),
    }
    prose = load_calibration(
        str(args.text), tokenizer, WINDOWS, length, held_out=0, option="text"
    ).calibration
    if ("source", "") not in known:
        yield {
            "target": "source",
            "calibration": "",
            **answered(source, tokenizer),
            **writing,
        } | about()
    for target, blend in pairs:
        if (target, blend) in known:
            continue
        out, seconds = converted(args, target, blend)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        losses = {}
        for text, tokens in (("dialogues", dialogues[:WINDOWS]), ("prose", prose)):
            drift = measure_drift(source, model, tokens, floor=False)
            losses[text] = {"kl": drift.kl, "excess": drift.excess, "agreement": drift.agreement}
        absorb(model)
        yield {
            "target": target,
            "calibration": blend,
            "fit_cpu_seconds": seconds,
            "losses": losses,
            **answered(model, tokenizer),
        } | about()


def converted(args: argparse.Namespace, target: str, blend: str) -> tuple[Path, int | None]:
    """The conversion, made if DIR lacks it, and the CPU seconds that it took, if they are known."""
    out: Path = args.work / f"{target}-{blend}".replace(" ", "-")
    noted = out.with_suffix(".seconds")
    if not out.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = ["--calibration", str(args.calibration), *BLENDS[blend]]
        run(
            ["convert", str(args.model), str(out), *TARGETS[target].split(), *FIT, *text, "--quiet"]
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        noted.write_text(
            str(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
        )
    return out, int(noted.read_text()) if noted.exists() else None


def answered(model: Any, tokenizer: Any) -> dict[str, list[str]]:
    """The model's greedy answers to the instructions, in its chat template."""
    asked = [prompt_tokens(tokenizer, Prompt(text, "", LONGEST)) for text in INSTRUCTIONS]
    replies = write_replies(model, tokenizer, asked, LONGEST, len(asked), lambda _: None)
    return {
        "answers": [tokenizer.decode(reply, skip_special_tokens=True).strip() for reply in replies]
    }


def about() -> dict[str, Any]:
    return {**conditions(), "commit": commit()}


def show(row: dict[str, Any]) -> None:
    kls = {text: round(each["kl"], 3) for text, each in row.get("losses", {}).items()}
    print(row["target"], row["calibration"], f"KL {kls}" if kls else "", flush=True)


def page(measured: list[dict[str, Any]]) -> str:
    """docs/chat.md: the losses, then the answers of every model to every instruction."""
    source, *others = measured
    machine = source["machine"]
    versions = source["versions"]
    lines = [
        "# What does a chat model answer after a conversion?",
        "",
        (
            "Calibrated on prose alone, a chat model loses more in conversations than on prose. By"
            " default a source with a"
        ),
        (
            "chat template therefore calibrates on dialogues that it writes itself, too: a third of"
            " the text."
        ),
        "",
        (
            "| target | calibrated on | dialogues: KL | dialogues: top-1 | prose: KL | prose:"
            " excess | fit, CPU seconds |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for row in others:
        chat = row["losses"]["dialogues"]
        prose = row["losses"]["prose"]
        seconds = row["fit_cpu_seconds"] or ""
        lines.append(
            f"| {row['target']} | {row['calibration']} | {chat['kl']:.3f} |"
            f" {100 * chat['agreement']:.1f} % | {prose['kl']:.3f} | {prose['excess']:+.3f} |"
            f" {seconds} |"
        )
    count, length = source["dialogues"]
    lines += [
        "",
        (
            f"SmolLM2-135M-Instruct, as fitted (`{' '.join(FIT)}`), neither refined nor polished."
            " KL and excess are in"
        ),
        (
            f"nats per token, on {WINDOWS} x {length} tokens of dialogues that the model wrote with"
            " another seed, and on"
        ),
        (
            f"as many of held-out prose. Writing {count} x {length} tokens of dialogues, as a"
            " conversion does, took"
        ),
        (
            f"{source['writing_cpu_seconds']} CPU seconds. {machine['processor']},"
            f" {machine['threads']} thread,"
        ),
        f"{source['date']}, torch {versions['torch']}, transformers {versions['transformers']};",
        (
            "`recipes/chat_answers.py` ([all figures and"
            " answers](../recipes/results/chat_answers.json))."
        ),
        "",
        (
            "The KL on dialogues is a mean over thousands of tokens, but a single answer goes"
            " either way: that about the"
        ),
        "capital of France is wrong at a third with dialogues, and right without.",
        "",
        f"The greedy answers to twenty fixed instructions, at most {LONGEST} tokens each:",
    ]
    for number, instruction in enumerate(INSTRUCTIONS):
        lines += ["", f"**{instruction}**", ""]
        for row in measured:
            name = "source" if row is source else f"{row['target']}, {row['calibration']}"
            lines.append(f"- {name}: {_quoted(row['answers'][number])}")
    return "\n".join(lines) + "\n"


def _quoted(answer: str) -> str:
    """The answer as one line of code, so that Markdown shows it as it is."""
    text = " / ".join(filter(None, map(str.strip, answer.replace("`", "'").splitlines())))
    return f"`{text}`" if text else "(nothing)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, help="prose")
    parser.add_argument("--text", type=Path, required=True, help="held-out prose")
    parser.add_argument("--work", type=Path, required=True, help="folder for converted checkpoints")
    parser.add_argument("--targets", nargs="+", choices=CHOSEN, default=CHOSEN)
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    parser.add_argument(
        "--page", type=Path, help="where the page is written, once all rows are measured"
    )
    args = parser.parse_args()
    measured: list[dict[str, Any]] = []

    def both(row: dict[str, Any]) -> None:
        measured.append(row)
        show(row)

    header = {"model": "SmolLM2-135M-Instruct", "fit": " ".join(FIT), "instructions": INSTRUCTIONS}
    continue_rows(args.json, header, lambda done: rows(args, done), both)
    if args.page is not None:
        args.page.write_text(page(measured))


if __name__ == "__main__":
    main()
