"""Which second moment a low-rank basis of the values should be fitted to, by position in long
sequences.

    python recipes/benchmarks/value_bases.py MODEL --text FILE --layers 3,9 --json
    recipes/results/value_bases.json

MODEL is a llama. In each layer all value heads get one basis of RANK channels, the principal
components of the values in units of the layer's output, over

    tokens     the attention inputs of all tokens received   the mean of that and of the inputs
    weighted by the attention that they receive, as kvfold may choose averages   the inputs averaged
    as each head attends to them both       the last two, each with the energy of the values at one

from 3 x 2048 tokens of FILE; the errors are those of the attention output on 2 x 2048 tokens of its
end, with the source's attention, in thousandths of the residual's mean square. `--noise SHARE` adds
a row: the excess loss of MODEL with noise of this share of the residual's mean square, independent
at every token, in the output of each attention.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measured import Row, conditions, continue_rows
from position_causes import attention_weights, source_parts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention.drift.compare import stretch_bounds
from kvfold.convert.measure.losses import token_losses, token_windows
from kvfold.convert.transforms.linalg import metric_root

TRAIN = 3
TEST = 2
LENGTH = 2048


class Attended:
    """A layer's attention inputs ``x [T, E]`` of one sequence, its weights ``[H, T, T]`` and its
    output ``[T, E]``.
    """

    def __init__(self, model: Any, layer: Any, hidden: Tensor) -> None:
        self.x = layer.input_layernorm(hidden[None])
        turn = model.model.rotary_emb(self.x, torch.arange(len(hidden))[None])
        query, key, values = source_parts(layer.self_attn, self.x, turn)
        self.weights = attention_weights(query, key)[0]
        self.output = layer.self_attn.o_proj((self.weights @ values[0]).transpose(0, 1).flatten(1))
        self.x = self.x[0]


def covariances(parts: list[Attended], values: Tensor) -> dict[str, Tensor]:
    """``[E, E]`` each, over the sequences ``parts``; ``values [n, E]`` are rows in units of the
    output.
    """

    def moments(rows: Tensor, weights: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(rows, (0, 1), value=1.0)  # the last row is the mean
        return ((rows * weights[:, None]).mT @ rows).double() / float(weights.sum())

    def mean(found: list[Tensor]) -> Tensor:
        return torch.stack(found).mean(0)

    def covariance(moment: Tensor) -> Tensor:
        return moment[:-1, :-1] - torch.outer(moment[-1, :-1], moment[-1, :-1])

    ones = torch.ones(LENGTH)
    tokens = mean([moments(part.x, ones) for part in parts])
    received = mean([moments(part.x, part.weights.mean(0).sum(0)) for part in parts])
    averages = mean([moments(head @ part.x, ones) for part in parts for head in part.weights])
    found = {"tokens": tokens, "received": (tokens + received) / 2, "averages": averages}
    found = {name: covariance(moment) for name, moment in found.items()}
    unit = {name: cov / (values @ cov @ values.mT).trace() for name, cov in found.items()}
    return {**found, "both": unit["received"] + unit["averages"]}


def rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    text = args.text.read_text(encoding="utf-8")
    size = 60_000 * TRAIN
    tokens = torch.cat(
        [
            token_windows(tokenizer, part, count, LENGTH)
            for part, count in ((text[:size], TRAIN), (text[-60_000 * TEST :], TEST))
        ]
    )
    if args.noise and not any("noise" in row for row in done):
        excess = noisy(model, tokens[TRAIN:], args.noise)
        yield {"noise": args.noise, "excess": excess, **conditions()}
    wanted = {int(each) for each in args.layers.split(",")} - {row.get("layer") for row in done}
    hidden = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers[: max(wanted, default=-1) + 1]):
        if index in wanted:
            yield {
                "layer": index,
                "rank": args.rank,
                "errors": errors(model, layer, hidden, args.rank),
                **conditions(),
            }
        turn = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
        hidden = torch.cat([layer(part, position_embeddings=turn) for part in hidden.split(1)])


def noisy(model: Any, tokens: Tensor, share: float) -> list[float]:
    """The excess loss by stretch of positions with noise in the attention outputs."""
    before = token_losses(model, tokens)
    inputs = dict[str, Tensor]()

    def keep(module: Any, given: tuple[Tensor, ...]) -> None:
        inputs["hidden"] = given[0]

    def add(module: Any, given: Any, output: Any) -> Any:
        size = (inputs["hidden"] + output[0]).square().mean(-1, keepdim=True)
        return output[0] + torch.randn_like(output[0]) * (share * size).sqrt(), *output[1:]

    torch.manual_seed(0)
    hooks = [layer.register_forward_pre_hook(keep) for layer in model.model.layers]
    hooks += [layer.self_attn.register_forward_hook(add) for layer in model.model.layers]
    excess = token_losses(model, tokens) - before
    for hook in hooks:
        hook.remove()
    return [float(excess[:, first - 1 : last - 1].mean()) for first, last in stretch_bounds(LENGTH)]


def errors(model: Any, layer: Any, hidden: Tensor, rank: int) -> dict[str, list[float]]:
    """The relative squared error of the attention output by stretch of positions, for each
    covariance.
    """
    attention = layer.self_attn
    width = hidden.shape[-1]
    value = attention.v_proj.weight.double().unflatten(0, (-1, attention.head_dim))  # [G, D, E]
    output = (
        attention.o_proj.weight.double().unflatten(1, (-1, attention.head_dim)).transpose(0, 1)
    )  # [H, E, D]
    size = len(output) // len(value)
    metric = torch.unflatten(output.mT @ output, 0, (-1, size)).sum(1)
    stacked = (metric_root(metric)[0] @ value).flatten(0, 1)
    lost = {}
    found = dict[str, list[Tensor]]()
    for name, cov in covariances(
        [Attended(model, layer, each) for each in hidden[:TRAIN]], stacked
    ).items():
        root = torch.linalg.cholesky(cov + 1e-6 * cov.diagonal().mean() * torch.eye(width))
        top = torch.linalg.svd(stacked @ root, full_matrices=False)[2][:rank]
        left = torch.eye(width).double() - root @ top.mT @ top @ torch.linalg.inv(root)
        # [H, E, E]: what a head's output lacks of its averaged inputs
        lost[name] = (output @ (value @ left).repeat_interleave(size, 0)).float()
    for each in hidden[TRAIN:]:
        part = Attended(model, layer, each)
        residual = (each + part.output).square().mean(-1)
        for name, maps in lost.items():
            # A constant error would move into the output bias.
            error = sum(
                weights @ part.x @ one.mT for weights, one in zip(part.weights, maps, strict=True)
            )
            error = error - error.mean(0)
            found.setdefault(name, []).append(error.square().mean(-1) / residual)
    bounds = stretch_bounds(LENGTH)
    return {
        name: [1e3 * float(torch.stack(each)[:, first:last].mean()) for first, last in bounds]
        for name, each in found.items()
    }


def show(row: Row) -> None:
    if "noise" in row:
        print(
            f"noise of {row['noise']}",
            " ".join(f"{excess:+7.4f}" for excess in row["excess"]),
            flush=True,
        )
        return
    for name, each in row["errors"].items():
        print(
            f"layer {row['layer']:2} {name:9}",
            " ".join(f"{error:7.3f}" for error in each),
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--layers", default="3,9,15,21")
    parser.add_argument("--noise", type=float)
    parser.add_argument("--rank", type=int, default=112)
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    continue_rows(
        args.json,
        {"model": args.model.name, "train": TRAIN, "test": TEST},
        lambda done: rows(args, done),
        show,
    )


if __name__ == "__main__":
    main()
