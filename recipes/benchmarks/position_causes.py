"""Excess loss and KL by position, and which part of a latent attention makes them grow: each is swapped in turn.

    python recipes/benchmarks/position_causes.py MODEL OUT.. --text FILE --parts conversion --windows 12 --json FILE2
    python recipes/benchmarks/position_causes.py MODEL OUT.. --text FILE --parts none,scores,sink,values --windows 4

MODEL is a llama, each OUT a conversion of it to MLA, layout free. In every layer of OUT one part is replaced by what
the source's weights compute from the same inputs:

    conversion  nothing: the model as it is loaded, with attention in blocks, for long sequences
    none        nothing, with whole attention maps; `distance` needs it before
    values      values and output projection
    scores      queries and keys
    sink        the share of attention that the first token gets
    distance    the mean of the scores' error over the tokens at each distance, by head (found on the same text)
    reach       the share of attention that keys at 256 tokens and more get
    far         its distribution among them

Figures are in nats per token, with 95 % intervals over sequences, beside the source's own loss and entropy. On text
that MODEL samples after the first 64 tokens of each window (--written), excess loss and KL agree from there on, up to
sampling noise.
"""

import argparse
import math
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

PARTS = ("none", "values", "scores", "sink", "distance", "reach", "far")
FAR = 256
CHUNK = 256  # positions whose logits are kept at once
PROMPT = 64


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, H, T, d]`` rotated by halves, as llama does; ``cos`` and ``sin`` are ``[B, T, d]``."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def source_parts(module: nn.Module, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores ``[B, H, T, T]`` and values ``[B, H, T, d]`` of a llama attention, heads of groups repeated."""
    query, key, value = (
        project(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    groups = query.shape[1] // key.shape[1]
    key, value = rotated(key, *turn).repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return rotated(query, *turn) @ key.mT * module.scaling, value


def latent_parts(module: nn.Module, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores and values of a latent attention, by calling it with an attention function that returns them."""
    found: list[Tensor] = []

    def record(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        found[:] = [query @ key.mT * kwargs["scaling"], value]
        return value.transpose(1, 2), None

    ATTENTION["recording"] = record
    module.original(hidden, turn, None)
    return found[0], found[1]


ATTENTION: dict[str, Callable[..., Any]] = {}


def mixed(part: str, state: dict[str, Any], index: int, ours: Tensor, theirs: Tensor) -> Tensor:
    """Attention weights ``[B, H, T, T]`` from the scores of conversion and source, with ``part`` swapped."""
    length = ours.shape[-1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if part == "distance":
        ours = ours - state["bias"][index][:, distance.clamp_min(0)]
    weights, source = (each.masked_fill(distance < 0, -math.inf).softmax(-1) for each in (ours, theirs))
    if part == "scores":
        return source
    if part in ("sink", "reach"):
        group = distance >= FAR if part == "reach" else (torch.arange(length) == 0).expand(length, -1)
        return with_share(weights, group, share(source, group))
    if part == "far":
        group = distance >= FAR
        return torch.where(group, with_share(source, group, share(weights, group)), weights)
    return weights


def share(weights: Tensor, group: Tensor) -> Tensor:
    """The part of each query's attention ``[B, H, T, T]`` that goes to the keys of ``group [T, T]``."""
    return (weights * group).sum(-1, keepdim=True)


def with_share(weights: Tensor, group: Tensor, wanted: Tensor) -> Tensor:
    """The same distribution within ``group`` and beyond it, with ``wanted`` in the group."""
    own = share(weights, group)
    wanted = torch.where((own > 0) & (own < 1), wanted, own)
    inside, beyond = wanted / own.clamp_min(1e-30), (1 - wanted) / (1 - own).clamp_min(1e-30)
    return weights * torch.where(group, inside, beyond)


def note_bias(state: dict[str, Any], index: int, ours: Tensor, theirs: Tensor) -> None:
    """Add up the error of the scores by distance, against its mean over the keys of each query."""
    length = ours.shape[-1]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp_min(-1) + 1
    causal = (distance > 0).float()
    error = (ours - theirs) * causal
    error = (error - error.sum(-1, keepdim=True) / causal.sum(-1, keepdim=True)) * causal
    sums = error.new_zeros(error.shape[1], length + 1)
    sums.index_add_(1, distance.flatten(), error.sum(0).flatten(1))
    state["sums"][index] = state["sums"].get(index, 0) + sums[:, 1:]


def attend(
    part: str, state: dict[str, Any], index: int, module: nn.Module, source: nn.Module, turn: Any,
    hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replaces ``module.forward``: the conversion's attention with ``part`` of the ``source``'s."""
    batch, length = hidden_states.shape[:2]
    ours, values = latent_parts(module, hidden_states, position_embeddings)
    theirs, own = source_parts(source, hidden_states, turn(hidden_states, torch.arange(length)[None].expand(batch, -1)))
    if part == "none":
        note_bias(state, index, ours, theirs)
    weights = mixed(part, state, index, ours, theirs)
    values, project = (own, source.o_proj) if part == "values" else (values, module.o_proj)
    return project((weights @ values).transpose(1, 2).flatten(2)), None


def written(model: Any, tokens: Tensor) -> Tensor:
    """Sequences as long as ``tokens [N, T]``, sampled from ``model`` after their first tokens, past any end of text."""
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    prompt = tokens[:, :PROMPT]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    new = tokens.shape[1] - PROMPT
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **sampling)


def states(model: Any, tokens: Tensor) -> list[Tensor]:
    """The last hidden state ``[1, T, D]`` of each sequence."""
    return [model.model(row, use_cache=False).last_hidden_state for row in tokens.split(1)]


def head(model: Any) -> Any:
    """What `compare_predictions` needs of a model whose last states are known."""
    return SimpleNamespace(device=torch.device("cpu"), logits=model.lm_head)


def certainty(model: Any, expected: list[Tensor], tokens: Tensor) -> Tensor:
    """The loss and the entropy of ``model``, whose states are ``expected``, in each stretch: ``[stretches, 2]``."""
    found = []
    for hidden, labels in zip(expected, tokens[:, 1:].split(1), strict=True):
        parts = zip(hidden[:, :-1].split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
        predicted = ((Categorical(logits=model.lm_head(part)), following) for part, following in parts)
        found.append(torch.cat([torch.stack([-each.log_prob(ids), each.entropy()], -1) for each, ids in predicted], 1))
    both = torch.cat(found).double()
    return torch.stack([both[:, first - 1 : last - 1].mean((0, 1)) for first, last in stretch_bounds(tokens.shape[1])])


def by_position(source: Any, student: Any, expected: list[Tensor], tokens: Tensor, sure: Tensor) -> list[Row]:
    """Excess loss and KL in each stretch beside the source's own ``sure``; ``expected`` are the source's states."""
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
    tokens = token_windows(tokenizer, args.text.read_text(encoding="utf-8"), args.windows, args.length)
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
        state: dict[str, Any] = {"sums": {}}
        counts = torch.arange(args.length, 0, -1) * len(tokens)
        modules = [layer.self_attn for layer in student.model.layers]
        for module in modules:
            module.original = module.forward
        for part in args.parts:
            row = {"converted": folder.name, "swapped": part, **text}
            measured = any(row.items() <= each.items() for each in done)
            if measured and not (part == "none" and "distance" in args.parts):
                continue
            student.config._attn_implementation = blocks if part == "conversion" else "recording"
            for index, (module, layer) in enumerate(zip(modules, source.model.layers, strict=True)):
                swapped = partial(attend, part, state, index, module, layer.self_attn, source.model.rotary_emb)
                module.forward = module.original if part == "conversion" else swapped
            stretches = by_position(source, student, expected, tokens, sure)
            if part == "none":
                state["bias"] = {index: sums / counts for index, sums in state["sums"].items()}
            if not measured:
                yield {**row, "positions": stretches, **conditions()}


def show(row: Row) -> None:
    print(
        f"{row['converted']}, {row['swapped']}, {row['windows']} x {row['length']}:",
        "  ".join(f"{s['from']}-{s['to']} {s['excess']:+.4f} ({s['kl']:.4f})" for s in row["positions"]),
        flush=True,
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("converted", type=Path, nargs="+", metavar="out")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas: conversion, " + ", ".join(PARTS))
    parser.add_argument(
        "--written", action="store_true", help="on text that MODEL samples from each window's beginning"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - {"conversion", *PARTS}:
        parser.error(f"--parts has no {', '.join(sorted(unknown))}")
    if args.written and args.length <= PROMPT:
        parser.error(f"--written needs a --length of more than {PROMPT}")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("recording", lambda *a, **k: ATTENTION["recording"](*a, **k))
    continue_rows(args.json, {"model": args.model.name}, partial(rows, args), show)


if __name__ == "__main__":
    main()
