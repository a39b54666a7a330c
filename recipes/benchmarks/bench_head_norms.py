"""What linear maps miss of norms on queries and keys: where ``transforms/head_norms.py`` gets its
figures.

    python recipes/benchmarks/bench_head_norms.py MODEL [--samples 32] [--layer 1] [--folds
    KV_HEADS]

takes the attention inputs of a checkpoint with such norms over the text that ships, and prints for
queries and keys of each layer the coefficient of variation of the divisors, and the squared error
on held-out text, relative to what is behind the norms, of

* the projection over one number per head;
* the map of least squares;
* a map of least squares over one divisor per token, the mean of all key heads', which is the most
  that the live norm of a latent could add; with the error of values that go through the same
  divisor.

Then the error of the keys of one layer over numbers of tokens and values of ``SHRINK``. The figures
in the code are of the shipped model with norms put in: ``train_demo.py --output DIR --texts shipped
--qk-norm --start MODEL --steps 1``. ``--folds`` prints the error of the attention's output instead,
for neighboring key/value heads folded from keys over one number per head and from those of least
squares; the figures in the code are of the same model trained on (``--steps 240 --warmup 10
--peak-rate 1.5e-3 --seed 1``). ``--latents R+P ...`` prints what layout ``kvfold`` gains by
dividing by the norm's own divisors: the part of the keys that a fitted latent misses, and the
squared error of the divisors if they were computed from it (from the keys that come closest to the
source's, with the mean energy of what these lack).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoTokenizer

from kvfold.attention.drift.recording import LayerOutput
from kvfold.convert import ConvertRequest
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import load_tokens, source_stream
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.conversion.source import fold_rotary, source_layer, source_rotary
from kvfold.convert.conversion.student import StudentWalk
from kvfold.convert.families.layout import read_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import load_calibration
from kvfold.convert.transforms import head_norms
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.head_norms import linear_heads, project
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.latent import to_latent
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics
from kvfold.convert.walk.passes import embed
from kvfold.convert.walk.statistics import StatisticsAccumulator

TOKENS = (128, 512, 2048, 8192)
SHRINKS = (1e-9, 0.03, 0.3, 3.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What linear maps miss of norms on queries and keys."
    )
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=32, help="sequences of 256 tokens")
    parser.add_argument(
        "--layer", type=int, default=1, help="the one whose keys are fitted with other constants"
    )
    parser.add_argument(
        "--folds", type=int, metavar="KV_HEADS", help="the error of folds to so many heads instead"
    )
    parser.add_argument(
        "--latents",
        nargs="+",
        metavar="R+P",
        help="the divisors that latents of these sizes give instead",
    )
    options = parser.parse_args()
    if options.latents is not None:
        show_latents(
            options.model,
            options.samples,
            [tuple(map(int, split.split("+"))) for split in options.latents],
        )
        return
    if options.folds is not None:
        show_folds(options.model, options.samples, options.folds)
        return
    for layer, (weights, fitted, seen) in enumerate(layers(options.model, options.samples)):
        show_layer(layer, weights, fitted, seen)
        if layer == options.layer:
            show_constants(weights, fitted, seen)


def layers(folder: str, samples: int) -> list[tuple[AttentionWeights, Tensor, Tensor]]:
    """Each layer's weights, and its attention inputs ``[N, E]`` on calibration and on held-out
    text.
    """
    checkpoint = open_checkpoint(folder)
    model = model_of(checkpoint.config)
    stream = CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors))
    tokens = load_calibration(None, AutoTokenizer.from_pretrained(folder), samples, 256, 0)
    parts = [
        [inputs for *_, inputs in survey_all(stream, part)]
        for part in (tokens.calibration, tokens.held_out)
    ]
    weights = (read_layer(model, layer, checkpoint.read) for layer in range(model.geometry.layers))
    return [(each.map(Tensor.double), *pair) for each, *pair in zip(weights, *parts, strict=True)]


def survey_all(stream: CheckpointStream, tokens: Tensor) -> list[tuple[int, Tensor]]:
    """Every layer's inputs for all ``tokens``."""
    states = embed(stream, tokens)
    found = []
    for index in range(stream.layers):
        with stream.open_layer(index) as layer, torch.no_grad(), stream.training():
            outputs = [layer(hidden) for hidden in states]
        states = [output.states for output in outputs]
        found.append(
            (
                index,
                torch.cat([output.attention_input.flatten(0, -2).double() for output in outputs]),
            )
        )
    return found


def gathered(weights: AttentionWeights, inputs: Tensor) -> LayerStatistics:
    """The statistics of ``inputs [N, E]``."""
    accumulator = StatisticsAccumulator(profile=False, weights=weights)
    accumulator.add(LayerOutput(None, inputs[None], inputs[None]))
    return accumulator.result()


def missed(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())


def show_layer(layer: int, weights: AttentionWeights, inputs: Tensor, seen: Tensor) -> None:
    statistics, (wanted, divisors) = gathered(weights, inputs), project(weights, seen)
    one_number = project(linear_heads(weights, replace(statistics, normed=None)), seen)[0]
    mapped = project(linear_heads(weights, statistics), seen)[0]
    spread = divisors.std(0) / divisors.mean(0)
    shared = shared_divisor(weights, inputs)
    held = shared_divisor(weights, seen)
    rows = project(weights, inputs)[0].flatten(1)
    divided = under(inputs, rows, shared, seen, held).view_as(wanted)
    value = weights.v.flatten(0, 1).mT
    values = missed(under(inputs, inputs @ value, shared, seen, held), seen @ value)
    for name, side in (("queries", slice(weights.heads)), ("keys", slice(weights.heads, None))):
        errors = (
            missed(found[:, side], wanted[:, side]) for found in (one_number, mapped, divided)
        )
        one, least, live = errors
        print(
            f"layer {layer} {name:7}: spread {spread[side].mean():.3f}; one number {one:.4f}, least"
            f" squares {least:.4f}, under a shared divisor {live:.4f}"
            + (f" (values {values:.4f})" if name == "keys" else "")
        )


def shared_divisor(weights: AttentionWeights, inputs: Tensor) -> Tensor:
    """The mean over key heads of what their norms divide by, each in units of its own mean;
    ``[N]``.
    """
    divisors = project(weights, inputs)[1][:, weights.heads :]
    return (divisors / divisors.mean(0)).mean(1)


def under(
    inputs: Tensor, rows: Tensor, divisor: Tensor, seen: Tensor, seen_divisor: Tensor
) -> Tensor:
    """``rows [N, n]`` on ``seen`` by least squares for a linear map that is divided afterwards."""
    fitted = torch.linalg.lstsq(inputs, rows * divisor[:, None]).solution
    return seen @ fitted / seen_divisor[:, None]


def show_constants(weights: AttentionWeights, inputs: Tensor, seen: Tensor) -> None:
    keys = slice(weights.heads, None)
    wanted = project(weights, seen)[0][:, keys]
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    present = head_norms.SHRINK
    for tokens in (count for count in TOKENS if count <= len(inputs)):
        statistics = gathered(weights, inputs[order[:tokens]])
        errors = []
        for head_norms.SHRINK in SHRINKS:
            found = project(linear_heads(weights, statistics), seen)[0][:, keys]
            errors.append(f"SHRINK {head_norms.SHRINK:g}: {missed(found, wanted):.4f}")
        print(f"  {tokens} tokens, keys: {', '.join(errors)}")
    head_norms.SHRINK = present


def show_folds(folder: str, samples: int, kv_heads: int) -> None:
    request = ConvertRequest(
        model=folder,
        out=f"{folder}-folds",
        to="gqa",
        kv_heads=kv_heads,
        samples=samples,
        seq_len=256,
        quiet=True,
    )
    plan = make_plan(request, open_checkpoint(folder))
    stages = Stages(None, quiet=True)
    with TemporaryDirectory() as scratch:
        walk = StudentWalk(
            plan,
            source_stream(plan, Path(scratch)),
            load_tokens(plan, Path(scratch), stages),
            statistics=True,
        )
    groups = grouping.contiguous(plan.geometry.kv_heads, kv_heads)
    for step in walk.steps:
        weights = source_layer(plan, step.index)
        errors = []
        for statistics in (replace(step.statistics, normed=None), step.statistics):
            rotary = fold_rotary(plan, step.index)
            positions = plan.geometry.positions
            context = min(positions, plan.model.layers[step.index].window or positions)
            folded = principal.fold(weights, statistics, rotary, groups, context)
            errors.append(step.attention_error(plan.layout.encode(step.index, folded)))
        step.skip()
        print(
            f"layer {step.index}: keys over one number {errors[0]:.4f}, of least squares"
            f" {errors[1]:.4f}"
        )


def show_latents(folder: str, samples: int, splits: list[tuple[int, int]]) -> None:
    request = ConvertRequest(
        model=folder, out=f"{folder}-latents", to="mqa", samples=samples, seq_len=256, quiet=True
    )
    plan = make_plan(request, open_checkpoint(folder))
    stages = Stages(None, quiet=True)
    with TemporaryDirectory() as scratch:
        walk = StudentWalk(
            plan,
            source_stream(plan, Path(scratch)),
            load_tokens(plan, Path(scratch), stages),
            statistics=True,
        )
    for step in walk.steps:
        weights = source_layer(plan, step.index)
        rotary = source_rotary(plan, step.index)
        inputs = torch.cat(
            [step.teacher.attend(hidden).attention_input.flatten(0, 1) for hidden in step.held_out]
        )
        inputs = inputs.double()
        context = plan.geometry.positions
        for rank, rope in splits:
            surveyed = rope_slots.survey_layer(
                linear_heads(weights, step.statistics), step.statistics, rotary, context
            )
            slots = rope_slots.choose_slots([surveyed], rope)
            latent = to_latent(weights, step.statistics, rotary, slots, rank, context=context)
            cached = inputs @ torch.cat([latent.down, latent.rope_key]).double().mT
            cached = torch.cat([cached, torch.ones_like(cached[:, :1])], 1)
            keys = torch.einsum("ne,gde->ngd", inputs, weights.k.double())
            close = (cached @ torch.linalg.lstsq(cached, keys.flatten(1)).solution).view_as(keys)
            lacking = (keys - close).square().sum(-1)
            energy = keys.square().sum(-1)
            guessed = (close.square().sum(-1) + lacking.mean(0)).sqrt()
            wrong = missed(guessed, energy.sqrt())
            print(
                f"layer {step.index} {rank}+{rope}: keys miss {lacking.sum() / energy.sum():.4f},"
                f" divisors {wrong:.4f}"
            )
        step.skip()


if __name__ == "__main__":
    main()
