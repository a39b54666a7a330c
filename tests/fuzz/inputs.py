"""Inputs by their numbers: a seed, changes of its files, a command with options, all drawn from one
number.
"""

import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from fuzz.mutations import broken, change
from fuzz.seeds import RESULTS, SEEDS, SOURCES

from kvfold.convert.cli import kvfold

# How often each command is drawn; those that run a model are the slow ones.
COMMANDS = {
    "inspect": 20,
    "verify": 14,
    "convert": 22,
    "plan": 10,
    "calibrated": 12,
    "drift": 7,
    "eval": 5,
    "sweep": 3,
    "uptrain": 4,
    "bench": 1.5,
    "recipe": 1.5,
}
RUN = ["--samples", "4", "--seq-len", "16"]
PLAIN = "0 1 -1 2 3 7 64 ² ① ٣ 1e3 0x10 1_0 nan inf -0.5 1e400 2147483648"
NUMBERS = [*PLAIN.split(), "", " 1 ", str(2**63 - 1), str(2**63), str(2**64), "9" * 5000]
WORDS = (
    "- x fifo folder text.txt loop missing/x.json missing auto self none cuda float64 link source"
    " text.txt:² a.png"
)
WORDS += " kvfold engine gqa:² mla:9+9 mqa,mqa 5XB 1e9GB ①GB text.txt:1e400 C:D a:b:c"
STRINGS = [*NUMBERS, *WORDS.split(), "", " ", "x" * 300, "a\nb", "\x1b[2J", "\u202e"]
# Options that ask for more work the larger they are: only small numbers and what is none.
LONG = {
    "steps",
    "refine",
    "polish",
    "effort",
    "threads",
    "seconds",
    "teacher",
    "tasks",
    "device",
    "temperature",
}
SMALL = ["0", "1", "2", "-1", "²", "", "x", "1e400x"]


@dataclass(frozen=True)
class Input:
    """A command line, in a folder with the seed ``seed`` as ``source`` or ``out``, changed by the
    ``changes``.
    """

    number: int
    command: str
    seed: str
    words: tuple[str, ...]
    changed: str  # the folder whose files are changed, or the file
    changes: tuple[int, ...]  # numbers, each of one change

    def __str__(self) -> str:
        plain = re.compile(r"[!-~]+")
        shown = " ".join(
            word[:80] if plain.fullmatch(word) else repr(word[:80]) for word in self.words
        )
        return (
            f"input {self.number}: seed {self.seed}, changes {list(self.changes)} of"
            f" {self.changed}: kvfold {shown}"
        )


def draw(number: int) -> Input:
    """The input of a number."""
    drawn = random.Random(number)
    command = drawn.choices(list(COMMANDS), list(COMMANDS.values()))[0]
    seed, words, changed = REQUESTS.get(command, simple)(command, drawn)
    words += outputs(words[0], drawn)
    count = drawn.choice([0, 1, 1, 1, 1, 1, 2])
    if count == 0 or drawn.random() < 0.12:
        words = with_options(words, drawn)
    return Input(
        number,
        command,
        seed,
        tuple(words),
        changed,
        tuple(drawn.randrange(10**9) for _ in range(count)),
    )


def simple(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    return drawn.choice(list(SEEDS)), [command, "source"], "source"


def conversion(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    """With weights only, from text, or a plan; now and then of a checkpoint that is a result
    already.
    """
    seed = drawn.choice(list(SOURCES)) if drawn.random() < 0.85 else drawn.choice(list(RESULTS))
    target = list(drawn.choice(SEEDS[seed].targets))
    words = ["convert", "source", "result", "--to", *target]
    if command == "calibrated" or "--budget" in target:
        words += ["--calibration", drawn.choice(["text.txt", "text.txt", "self"]), *RUN]
        words += drawn.choice(
            [[], [], ["--refine", "1"], ["--polish", "1"], ["--refine", "1", "--polish", "1"]]
        )
        words += drawn.choice([[], ["--rotate-latent"] if target[0] == "mla" else []])
    else:
        words += [
            "--method",
            drawn.choice(["svd"] if target[0] == "mla" else ["mean", "first", "random"]),
        ]
    further = ["--dtype bfloat16", "--max-shard-size 40KB", "--allow-growth", "--fresh", "", ""]
    words += drawn.choice(further).split()
    words += (
        ["--keep-quantized"]
        if drawn.random() < (0.5 if seed in ("fp8", "int8", "mxfp4") else 0.02)
        else []
    )
    return seed, [*words, "--dry-run"] if command == "plan" else words, "source"


def comparison(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    seed = drawn.choice(list(RESULTS))
    words = [command, "source", "out", "--text", "text.txt"]
    sizes = RUN if command == "drift" else ["--lengths", "32", "--samples", "2", "--no-retrieval"]
    return seed, words + sizes, drawn.choice(["source", "out"])


def survey(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    seed = drawn.choice(list(SOURCES))
    targets = sorted(
        {
            "mla:12" if "mla" in each else each[0].replace("gqa", "gqa:2")
            for each in SEEDS[seed].targets
        }
    )
    words = f"sweep source --targets {drawn.choice(targets)} --calibration text.txt".split() + RUN
    return seed, [*words, *drawn.choice(["", "--out result --within 0.999"]).split()], "source"


def training(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    words = (
        "uptrain source result --text text.txt --steps 1 --batch-tokens 32 --seq-len 16 --eval-text"
        " text.txt"
    )
    further = drawn.choice(["", " --teacher teacher", " --eval-every 0"])
    return drawn.choice(list(RESULTS)), f"{words} --eval-sequences 2{further}".split(), "source"


def timing(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    words = ["bench", "source", "--context", "8", "--prefill-tokens", "8", "--seconds", "0.001"]
    return drawn.choice(list(SEEDS)), words, "source"


def by_recipe(command: str, drawn: random.Random) -> tuple[str, list[str], str]:
    words = ["convert", "source", "result", "--recipe", "recipe.toml"]
    return drawn.choice(["llama", "chat", "fp8"]), words, drawn.choice(["recipe.toml", "source"])


REQUESTS = {
    **dict.fromkeys(("convert", "plan", "calibrated"), conversion),
    **dict.fromkeys(("drift", "eval"), comparison),
    "sweep": survey,
    "uptrain": training,
    "bench": timing,
    "recipe": by_recipe,
}


def outputs(command: str, drawn: random.Random) -> list[str]:
    """--json to stdout or a file, --report, or neither."""
    names = {each.name for each in kvfold.commands[command].params}
    words = drawn.choice([["--json", "-"], ["--json", "facts.json"], [], []])
    if "report" in names and drawn.random() < 0.2:
        words = [*words, "--report", "report"]
    quiet = ["--quiet"] if "quiet" in names and drawn.random() < 0.7 else []
    return [*words, *quiet]


def with_options(words: list[str], drawn: random.Random) -> list[str]:
    """``words`` with one or two more options, of values that fit their type or do not."""
    options = [each for each in kvfold.commands[words[0]].params if isinstance(each, click.Option)]
    for option in drawn.choices(options, k=drawn.choice([1, 1, 2])):
        if option.name in ("trust_remote_code", "tasks", "out"):  # what is judged is in "result"
            continue
        given = [drawn.choice(option.opts)]
        if not option.is_flag:
            numbers = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
            known = (option.metavar or "").strip("[]").split("|")
            values = SMALL if option.name in LONG else NUMBERS if numbers else STRINGS + known
            # A fork of a process whose OpenMP has threads waits for them for ever.
            values = (
                [each for each in values if each != "2"] if option.name == "threads" else values
            )
            given.append(drawn.choice(values))
        words = [*words, *given]
    return words


def prepare(seeds: Path, case: Path, drawn: Input) -> list[str]:
    """Fill the new folder ``case`` for an input. Returns what was changed, for a report."""
    seed = SEEDS[drawn.seed]
    case.mkdir(parents=True)
    pair = drawn.command in ("drift", "eval")
    shutil.copytree(seeds / (str(seed.source) if pair else seed.name), case / "source")
    if pair:
        shutil.copytree(seeds / seed.name, case / "out")
    if "teacher" in drawn.words:
        source = SEEDS[str(seed.source)]
        shutil.copytree(seeds / (source.source or source.name), case / "teacher")
    shutil.copyfile(seeds / "text.txt", case / "text.txt")
    (case / "folder").mkdir()
    (case / "loop").symlink_to("loop")
    (case / "link").symlink_to("kept")
    (case / "kept").write_text("kept")
    os.mkfifo(case / "fifo")
    (case / "recipe.toml").write_text(
        'to = "mqa"\nmethod = "first"\n[about]\nmodel = "a/b"\nsaving = 0.5\n'
    )
    if drawn.changed == "recipe.toml":
        said = [broken(case / drawn.changed, random.Random(number)) for number in drawn.changes]
        return [f"broken {drawn.changed}: {each}" for each in said]
    return [change(case / drawn.changed, random.Random(number)) for number in drawn.changes]


def smaller(drawn: Input) -> Sequence[Input]:
    """The same input with one change less."""
    kept = [tuple(each for each in drawn.changes if each != gone) for gone in drawn.changes]
    return [replace(drawn, changes=changes) for changes in kept]
