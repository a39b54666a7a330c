"""Quantize a converted checkpoint with llm-compressor, all but what writes or reads a latent.

    python3 -m venv LLMC && LLMC/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    LLMC/bin/python recipes/quantize.py OUT QUANTIZED --scheme FP8_DYNAMIC --text FILE

llm-compressor takes a Python of its own: it pins an older transformers (5.17) than kvfold is tested with. QUANTIZED is
a compressed-tensors checkpoint, which transformers loads where compressed-tensors is installed, and vLLM is made for.
`FP8_DYNAMIC` (the default) and `W8A8` (INT8) have weights with a scale per row and activations with one per token,
`W4A16` whole numbers for weights alone, a scale for every 128 inputs, or 64 or 32 where widths are no multiples; none
needs calibration text. `--text` compares QUANTIZED with OUT on 16 x 256 tokens.

Left as they are: the output head, and in latent attention (MLA) `kv_a_proj_with_mqa`, `kv_b_proj`, `q_a_proj` and
`q_b_proj`. In layout `free` the latent that `kv_b_proj` reads has a constant channel a thousand times larger than the
others, so that one scale per token leaves nothing of them; `--all` quantizes them too and shows what that costs.
Experts of a `Mistral4ForCausalLM` are no linear layers and stay as they are.
"""

import argparse
import gc
import re
from pathlib import Path

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

LATENT = r"re:.*self_attn\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)$"
SCHEMES = ("FP8_DYNAMIC", "W8A8", "W4A16")
GROUPS = (128, 64, 32)  # inputs that share a scale in W4A16
WINDOWS, LENGTH = 16, 256


def quantize(source: Path, out: Path, scheme: str, *, everything: bool) -> None:
    """Write ``source`` quantized to ``out``, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    kept = ["lm_head"] if everything else ["lm_head", LATENT]
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    weights = groups["group_0"].weights
    if weights.group_size is not None:
        weights.group_size = group_size(model, everything=everything)
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=kept))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def group_size(model: torch.nn.Module, *, everything: bool) -> int:
    """The largest of ``GROUPS`` that divides the inputs of every matrix that is quantized. SystemExit without one."""
    linear = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    latent = re.compile(LATENT.removeprefix("re:"))
    widths = {
        part.in_features
        for name, part in linear.items()
        if name != "lm_head" and (everything or not latent.match(name))
    }
    found = next((size for size in GROUPS if not any(width % size for width in widths)), None)
    if found is None:
        raise SystemExit(
            f"W4A16: expected inputs that {GROUPS[-1]} divides, found {sorted(widths)}; use another scheme"
        )
    return found


@torch.no_grad()
def predictions(folder: Path, tokens: Tensor) -> Tensor:
    """Log-probabilities ``[N, T, V]`` of the next tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    return torch.cat([model(row[None]).logits.float().log_softmax(-1) for row in tokens])


def compare(source: Path, out: Path, text: str) -> str:
    """Excess loss and KL of ``out`` over ``source``, nats per token."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text, verbose=False)["input_ids"])
    count = min(WINDOWS, len(ids) // LENGTH)
    tokens = ids[: count * LENGTH].view(count, LENGTH)
    before, after = predictions(source, tokens), predictions(out, tokens)
    excess = (before - after)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    kl = (before.exp() * (before - after)).sum(-1).mean()
    return f"excess loss {excess:+.4f}, KL {kl:.4f} nats per token over {count} x {LENGTH} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="OUT")
    parser.add_argument("out", type=Path, metavar="QUANTIZED")
    parser.add_argument("--scheme", choices=SCHEMES, default=SCHEMES[0])
    parser.add_argument("--all", action="store_true", help="the latent projections too")
    parser.add_argument("--text", type=Path, help="compare on this text")
    args = parser.parse_args()
    quantize(args.model, args.out, args.scheme, everything=args.all)
    if args.text is not None:
        gc.collect()
        print(compare(args.model, args.out, args.text.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
