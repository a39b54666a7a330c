"""Excess loss and KL by position, and which part of a latent attention makes them grow: each is
swapped in turn.

    python recipes/benchmarks/position_causes.py MODEL OUT.. --text FILE --parts conversion
    --windows 12 --json FILE2 python recipes/benchmarks/position_causes.py MODEL OUT.. --text FILE
    --windows 12 --length 4096

MODEL is a llama, each OUT a conversion of it to MLA, layout free. In every layer of OUT one part is
replaced by what the source's weights compute from the same inputs:

    conversion  nothing
    values      values and output projection
    scores      queries and keys
    sink        the share of attention that the first token gets

Rotary keys and the keys in the latent are fitted together, so either of them with the source's in
place of the other would be worse than both models; conversions with all rotary dims, or a latent of
full rank, separate them.

Figures are in nats per token, with 95 % intervals over sequences, beside the source's own loss and
entropy. On text that MODEL samples after the first 64 tokens of each window (--written), excess
loss and KL agree from there on, up to sampling noise.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measured import Row, conditions, continue_rows
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention.drift.compare import compare_predictions, stretch_bounds
from kvfold.convert.measure.losses import token_windows
from kvfold.convert.stream.stock import attend_in_blocks

PARTS = ("conversion", "values", "scores", "sink")
CHUNK = 256  # positions whose logits, or attention weights, are kept at once
PROMPT = 64


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, H, T, d]`` rotated by halves, as llama does; ``cos`` and ``sin`` are ``[B, T, d]``."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def source_parts(
    module: nn.Module, hidden: Tensor, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled and rotated queries, rotated keys, and values of a llama attention, ``[B, H, T, d]``,
    heads repeated.
    """
    query, key, value = (
        project(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    groups = query.shape[1] // key.shape[1]
    key = rotated(key, *turn).repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    return rotated(query, *turn) * module.scaling, key, value


def converted_parts(
    module: nn.Module, hidden: Tensor, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a latent attention, from the attention function it calls."""
    found: list[Tensor] = []

    def record(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        found[:] = [query * kwargs["scaling"], key, value]
        return value.transpose(1, 2), None

    ATTENTION["recording"] = record
    module.original(hidden, turn, None)
    return found[0], found[1], found[2]


ATTENTION: dict[str, Callable[..., Any]] = {}


def attention_weights(query: Tensor, key: Tensor) -> Tensor:
    """``[B, H, t, T]`` of the last ``t`` tokens, whose scaled queries are ``query``, for the keys
    of all.
    """
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(
        key.shape[2] - query.shape[2] + 1
    )
    return (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1)


def with_sink(weights: Tensor, wanted: Tensor) -> Tensor:
    """``weights [B, H, t, T]`` with the share ``wanted [B, H, t, 1]`` for the first key, the others
    in proportion.
    """
    others = weights[..., 1:]
    # not 1 minus the first: that is rounding where the first gets nearly all
    return torch.cat(
        [wanted, others * (1 - wanted) / others.sum(-1, keepdim=True).clamp_min(1e-30)], -1
    )


def attend(
    part: str, module: nn.Module, source: nn.Module, turn: Any,
    hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replaces ``module.forward``: the conversion's attention with ``part`` of the ``source``'s."""
    batch, length = hidden_states.shape[:2]
    positions = torch.arange(length)[None].expand(batch, -1)
    query, key, values = converted_parts(module, hidden_states, position_embeddings)
    own_query, own_key, own_values = source_parts(
        source, hidden_states, turn(hidden_states, positions)
    )
    project = module.o_proj
    if part == "values":
        values = own_values
        project = source.o_proj
    if part == "scores":
        query = own_query
        key = own_key
    mixed = []
    for first in range(0, length, CHUNK):
        block = slice(first, first + CHUNK)
        seen = slice(first + CHUNK)
        weights = attention_weights(query[:, :, block], key[:, :, seen])
        if part == "sink":
            wanted = attention_weights(own_query[:, :, block], own_key[:, :, seen])[..., :1]
            weights = with_sink(weights, wanted)
        mixed.append(weights @ values[:, :, seen])
    return project(torch.cat(mixed, 2).transpose(1, 2).flatten(2)), None


def written(model: Any, tokens: Tensor) -> Tensor:
    """Sequences as long as ``tokens [N, T]``, sampled from ``model`` after their first tokens, past
    any end of text.
    """
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    prompt = tokens[:, :PROMPT]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    new = tokens.shape[1] - PROMPT
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **sampling
    )


def states(model: Any, tokens: Tensor) -> list[Tensor]:
    """The last hidden state ``[1, T, D]`` of each sequence."""
    return [model.model(row, use_cache=False).last_hidden_state for row in tokens.split(1)]


def head(model: Any) -> Any:
    """What `compare_predictions` needs of a model whose last states are known."""
    return SimpleNamespace(device=torch.device("cpu"), logits=model.lm_head)


def certainty(model: Any, expected: list[Tensor], tokens: Tensor) -> Tensor:
    """The loss and the entropy of ``model``, whose states are ``expected``, in each stretch:
    ``[stretches, 2]``.
    """
    found = []
    for hidden, labels in zip(expected, tokens[:, 1:].split(1), strict=True):
        parts = zip(hidden[:, :-1].split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
        predicted = (
            (Categorical(logits=model.lm_head(part)), following) for part, following in parts
        )
        found.append(
            torch.cat(
                [torch.stack([-each.log_prob(ids), each.entropy()], -1) for each, ids in predicted],
                1,
            )
        )
    both = torch.cat(found).double()
    return torch.stack(
        [
            both[:, first - 1 : last - 1].mean((0, 1))
            for first, last in stretch_bounds(tokens.shape[1])
        ]
    )


def by_position(
    source: Any, student: Any, expected: list[Tensor], tokens: Tensor, sure: Tensor
) -> list[Row]:
    """Excess loss and KL in each stretch beside the source's own ``sure``; ``expected`` are the
    source's states.
    """
    actual = states(student, tokens)
    measured = compare_predictions(head(source), head(student), expected, actual, tokens.split(1))
    return [
        {
            "from": each.start,
            "to": each.end,
            "excess": each.excess,
            "margin": each.margin,
            "kl": each.kl,
            "kl_margin": each.kl_margin,
            "source_loss": loss,
            "source_entropy": entropy,
        }
        for each, (loss, entropy) in zip(measured.stretches, sure.tolist(), strict=True)
    ]


def rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = token_windows(
        tokenizer, args.text.read_text(encoding="utf-8"), args.windows, args.length
    )
    source = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.written:
        tokens = written(source, tokens)
    expected = states(source, tokens)
    sure = certainty(source, expected, tokens)
    text = {"windows": len(tokens), "length": args.length, "written_by_source": args.written}
    for folder in args.converted:
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        attend_in_blocks(student, torch.device("cpu"))
        blocks = student.config._attn_implementation
        modules = [layer.self_attn for layer in student.model.layers]
        for module in modules:
            module.original = module.forward
        for part in args.parts:
            row = {"converted": folder.name, "swapped": part, **text}
            if any(row.items() <= each.items() for each in done):
                continue
            student.config._attn_implementation = blocks if part == "conversion" else "recording"
            for module, layer in zip(modules, source.model.layers, strict=True):
                swapped = partial(attend, part, module, layer.self_attn, source.model.rotary_emb)
                module.forward = module.original if part == "conversion" else swapped
            yield {
                **row,
                "positions": by_position(source, student, expected, tokens, sure),
                **conditions(),
            }


def show(row: Row) -> None:
    print(
        f"{row['converted']}, {row['swapped']}, {row['windows']} x {row['length']}:",
        "  ".join(
            f"{s['from']}-{s['to']} {s['excess']:+.4f} ({s['kl']:.4f})" for s in row["positions"]
        ),
        flush=True,
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("converted", type=Path, nargs="+", metavar="out")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas")
    parser.add_argument(
        "--written",
        action="store_true",
        help="on text that MODEL samples from each window's beginning",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts has no {', '.join(sorted(unknown))}")
    if args.written and args.length <= PROMPT:
        parser.error(f"--written needs a --length of more than {PROMPT}")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("recording", lambda *a, **k: ATTENTION["recording"](*a, **k))
    continue_rows(args.json, {"model": args.model.name}, partial(rows, args), show)


if __name__ == "__main__":
    main()
