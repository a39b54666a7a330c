"""What a quantized latent cache costs, with and without `--rotate-latent`.

    kvfold convert MODEL OUT --to mla --kv-rank 48 --rope-dim 16 --samples 32 --seq-len 256
    python recipes/benchmarks/bench_latent_cache.py OUT [OUT ..] [--text FILE] [--json FILE]

rounds what the cache of an engine would hold of every token's latent (the output of
`kv_a_layernorm`) as FP8 (e4m3) or as whole numbers, and prints the excess loss over the same
checkpoint with its latents as they are and, in brackets, the KL between the two, nats per token on
48 windows of 256 tokens: as stored, and with the channels mixed as `--rotate-latent` mixes them.
`FP8` has a scale of 1 and saturates, the default of engines; the others have one scale per token.
Rotary keys are left alone: the option does not touch them.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measured import conditions, continue_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.data import read_text
from kvfold.convert.measure.losses import token_windows
from kvfold.convert.transforms.latent.variants import hartley

WINDOWS = 48
LENGTH = 256
BATCH = 8
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def fp8(latent: Tensor) -> Tensor:
    """``latent [B, T, R]`` in FP8 as engines store it: saturating, unscaled."""
    return latent.clamp(-LARGEST, LARGEST).to(FP8).to(latent.dtype)


def fp8_per_token(latent: Tensor) -> Tensor:
    scale = _peak(latent) / LARGEST
    return fp8(latent / scale) * scale


def whole_numbers(bits: int) -> Callable[[Tensor], Tensor]:
    """Symmetric whole numbers of so many bits, one scale per token."""

    def rounded(latent: Tensor) -> Tensor:
        scale = _peak(latent) / (2 ** (bits - 1) - 1)
        return (latent / scale).round() * scale

    return rounded


def _peak(latent: Tensor) -> Tensor:
    return latent.abs().amax(-1, keepdim=True).clamp_min(1e-12)


CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "FP8": fp8,
    "FP8 per token": fp8_per_token,
    "INT8": whole_numbers(8),
    "INT4": whole_numbers(4),
}


@torch.no_grad()
def mix_channels(model: nn.Module) -> None:
    """What `--rotate-latent` does to a layer, done to a loaded model of either layout."""
    for layer in model.model.layers:
        attention = layer.self_attn
        down = layer.self_attn.kv_a_proj_with_mqa
        channels = attention.kv_lora_rank - (down.bias is not None)
        mix = hartley(channels)
        for rows in (down.weight, down.bias):
            if rows is not None:
                rows[:channels] = (mix @ rows[:channels].double()).to(rows)
        read = attention.kv_b_proj.weight
        read[:, :channels] = (read[:, :channels].double() @ mix).to(read)
        attention.kv_a_layernorm.weight[channels:] = 0


@torch.no_grad()
def drift(model: nn.Module, windows: Tensor) -> dict[str, tuple[float, float]]:
    """For each cache the excess loss and the KL to the predictions over exact latents, nats per
    token.
    """
    latents = [layer.self_attn.kv_a_layernorm for layer in model.model.layers]
    sums = dict.fromkeys(CACHES, torch.zeros(2, dtype=torch.float64, device=windows.device))
    for batch in windows.split(BATCH):
        exact = predictions(model, batch)
        for name, rounded in CACHES.items():
            hooks = [
                module.register_forward_hook(lambda *args, cast=rounded: cast(args[2]))
                for module in latents
            ]
            found = predictions(model, batch)
            for hook in hooks:
                hook.remove()
            sums[name] = sums[name] + differences(exact, found, batch)
    return {name: (float(excess), float(kl)) for name, (excess, kl) in sums.items()}


def predictions(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).logits[:, :-1].float().log_softmax(-1)


def differences(exact: Tensor, found: Tensor, batch: Tensor) -> Tensor:
    """Summed over tokens: the loss of ``found`` over that of ``exact``, and the KL between them."""
    losses = (exact - found).gather(-1, batch[:, 1:, None]).double().sum()
    return torch.stack([losses, (exact.exp() * (exact - found)).double().sum()])


def measured(model: nn.Module, windows: Tensor, folder: Path, channels: str) -> dict[str, Any]:
    """A row of the file: excess loss and KL of every cache, nats per token."""
    tokens = windows[:, 1:].numel()
    caches = {
        name: {"excess": a / tokens, "kl": b / tokens}
        for name, (a, b) in drift(model, windows).items()
    }
    return {"model": folder.name, "channels": channels, "caches": caches}


def rows(
    folders: Sequence[Path], text: str, count: int, done: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of the models that are not among ``done``."""
    for folder in folders:
        if any(row["model"] == folder.name and row["channels"] == "mixed" for row in done):
            continue
        windows = token_windows(AutoTokenizer.from_pretrained(folder), text, count, LENGTH)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        stored = measured(model, windows, folder, "as stored")
        mix_channels(model)
        yield stored
        yield measured(model, windows, folder, "mixed")


def show(row: dict[str, Any]) -> None:
    cells = (
        f"{name} {each['excess']:+.4f} ({each['kl']:.4f})" for name, each in row["caches"].items()
    )
    print(f"{row['model']:16} {row['channels']:10} {'  '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="OUT")
    parser.add_argument("--text", type=Path, help="by default the held-out text that ships")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument(
        "--json", type=Path, help="keep the rows in this file, and measure what it lacks"
    )
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    print(conditions())
    text = read_text("held_out") if args.text is None else args.text.read_text(encoding="utf-8")
    header = conditions() | {"windows": args.windows, "length": LENGTH}
    continue_rows(args.json, header, partial(rows, args.models, text, args.windows), show)


if __name__ == "__main__":
    main()
