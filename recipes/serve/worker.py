"""What the scripts of all engines share: a request read, an answer written, seconds measured. Needs
no package.

An engine's script runs in that engine's own Python: ``engine_NAME.py REQUEST.json ANSWER.json``.
The request holds ``model`` (a folder), ``prompts`` (lists of token ids), ``new_tokens``, ``dtype``,
``options`` (the engine's own) and ``speed`` (``batch``, ``context``, ``new_tokens``) or null. The
answer holds ``tokens`` (greedy, for every prompt), ``cache`` (elements per token per layer, as the
engine reports it), ``reported`` (its words), ``runs`` (the class that ran), ``versions`` and
``speed``; or ``error``, what the engine raised.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

BATCH = 20  # prompts that are written together

Generate = Callable[
    [list[list[int]], int], list[list[int]]
]  # prompts of one length, new tokens -> tokens


def main(serve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    answer = Path(sys.argv[2])
    try:
        found = serve(request)
    except Exception as error:  # a refusal is an answer, whatever the engine raised
        found = {"error": f"{type(error).__name__}: {error}"}
    answer.write_text(json.dumps(found))


def batches(prompts: list[list[int]]) -> list[list[list[int]]]:
    """``prompts`` in batches, of one prompt each unless all are equally long."""
    size = BATCH if len({*map(len, prompts)}) == 1 else 1
    return [prompts[at : at + size] for at in range(0, len(prompts), size)]


def versions(*packages: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    return {
        name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))
    }


def measure(speed: dict[str, int] | None, generate: Generate) -> dict[str, float] | None:
    """Tokens per second of reading ``batch`` prompts of ``context`` tokens, and of decoding behind
    them.
    """
    if speed is None:
        return None
    batch = speed["batch"]
    context = speed["context"]
    new_tokens = speed["new_tokens"]
    prompts = [[(7 * row + 13 * at) % 997 + 5 for at in range(context)] for row in range(batch)]

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        generate(prompts, new_tokens)
        return time.perf_counter() - start

    generate(
        [prompt[:16] for prompt in prompts], 2
    )  # what an engine sets up at its first call is not counted
    one = seconds(1)
    all_ = seconds(1 + new_tokens)
    return {
        "prefill_tokens_per_s": batch * context / one,
        "decode_tokens_per_s": batch * new_tokens / (all_ - one),
        "seconds_until_first": one,
        "seconds": all_,
    }
