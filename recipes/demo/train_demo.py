"""Make the model and the texts that kvfold ships: ``python recipes/demo/train_demo.py --output
DIR``.

Three stages: texts (see ``demo_texts.py``), a byte-level BPE tokenizer, and a small
``LlamaForCausalLM`` with plain multi-head attention. ``--texts shipped`` starts from the texts
inside kvfold instead of those of the running Python. Runs that differ in nothing but ``--output``
write equal bytes, unless ``--minutes`` cuts the schedule short. It did for the shipped model:
``--steps`` as the ``steps_done`` of its ``training.json`` make one like it, not the same.
``--texts-only`` stops after the first stage.

DIR then holds ``{train,calibration,held_out}.txt.xz`` and ``demo/``, a complete checkpoint with
``training.json``: how it was trained and what it reaches on the held-out text. About 40 minutes on
one core that multiplies in bfloat16.
"""

import argparse
import json
import lzma
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from demo_texts import SPLITS, build_texts
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvfold.convert.data import SEPARATOR, demo_folder, read_documents

BOS = "<s>"
EOS = "</s>"
PAD = "<pad>"


@dataclass(frozen=True)
class Recipe:
    vocabulary: int = 2048
    layers: int = 4
    heads: int = 8
    head_dim: int = 32
    intermediate: int = 416
    sequence: int = 512
    batch: int = 4
    steps: int = 3600
    warmup: int = 100
    peak_rate: float = 2e-3
    final_rate: float = 1e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0


def main() -> None:
    options = parse_options()
    recipe = Recipe(steps=options.steps, seed=options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    texts = {s: read_documents(s) for s in SPLITS} if options.texts == "shipped" else build_texts()
    write_texts(texts, options.output)
    if options.texts_only:
        return
    demo: Path = options.output / "demo"
    tokenizer = train_tokenizer(texts["train"], recipe)
    tokenizer.save_pretrained(demo)
    tokens = {split: encode(tokenizer, texts[split]) for split in SPLITS}
    print({split: len(t) for split, t in tokens.items()}, "tokens")

    torch.manual_seed(recipe.seed)
    model = AutoModelForCausalLM.from_config(model_config(recipe))
    done = train(model, tokens, recipe, options.minutes, demo)
    save(model, demo)
    report = {
        "recipe": asdict(recipe),
        "minutes": None if math.isinf(options.minutes) else options.minutes,
        "steps_done": done,
        "tokens_seen": done * recipe.batch * recipe.sequence,
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts_from_python": texts_version(options.texts),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        **measure(demo, tokens, recipe),
    }
    (demo / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the texts, the tokenizer and the model of kvfold demo."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--texts",
        choices=["running", "shipped"],
        default="running",
        help="of this Python, or kvfold's own",
    )
    parser.add_argument("--texts-only", action="store_true", help="stop after the texts")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end the schedule earlier, by the clock"
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    return parser.parse_args()


# texts and tokens


def texts_version(source: str) -> str:
    if source == "running":
        return platform.python_version()
    return str(json.loads((demo_folder() / "training.json").read_text())["texts_from_python"])


def write_texts(texts: dict[str, list[str]], output: Path) -> None:
    for split, documents in texts.items():
        packed = lzma.compress(SEPARATOR.join(documents).encode(), preset=9 | lzma.PRESET_EXTREME)
        (output / f"{split}.txt.xz").write_bytes(packed)
        characters = sum(map(len, documents))
        print(
            f"{split}: {len(documents)} documents, {characters:,} characters, {len(packed):,} bytes"
            " packed"
        )


def train_tokenizer(documents: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=recipe.sequence,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    """All documents in one stream ``[N]``, each followed by the end token."""
    stream: list[int] = []
    for ids in tokenizer(documents, verbose=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    return torch.tensor(stream)


# training


def model_config(recipe: Recipe) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.heads * recipe.head_dim,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.sequence,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        intermediate_size=recipe.intermediate,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        rms_norm_eps=1e-5,
    )


def train(
    model: PreTrainedModel, tokens: dict[str, Tensor], recipe: Recipe, minutes: float, demo: Path
) -> int:
    """Train in place; returns the number of steps taken. Every 400 steps a checkpoint replaces the
    one in ``demo``.
    """
    optimizer = make_optimizer(model, recipe)
    batches = batch_stream(tokens["train"], recipe)
    start = time.monotonic()
    running = 0.0
    step = 0
    while (progress := max(step / recipe.steps, (time.monotonic() - start) / 60 / minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, progress, recipe)
        loss = next_token_loss(model, next(batches), autocast=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        running += loss.item()
        if step % 100 == 0:
            print(
                f"step {step} {time.monotonic() - start:.0f} s, loss {running / 100:.3f}",
                flush=True,
            )
            running = 0.0
        if step % 400 == 0:
            # Judged on calibration text, so that the held-out text decides nothing.
            print(
                "  calibration"
                f" {window_losses(model, tokens['calibration'], recipe.sequence).mean():.4f}",
                flush=True,
            )
            save(model, demo)
    return step


def make_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(recipe.beta1, recipe.beta2))


def rate(step: int, progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine from the peak to the final rate over what is left of the
    budget.
    """
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return min(1.0, (step + 1) / recipe.warmup) * (
        recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * cosine
    )


def batch_stream(stream: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Endless batches ``[batch, sequence]``: every pass cuts the text at other places and shuffles
    the windows.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        offset = int(torch.randint(recipe.sequence, (1,), generator=generator))
        cut = windows(stream[offset:], recipe.sequence)
        order = torch.randperm(len(cut), generator=generator)
        for rows in order.split(recipe.batch):
            if len(rows) == recipe.batch:
                yield cut[rows]


def windows(stream: Tensor, sequence: int) -> Tensor:
    """The stream ``[N]`` cut into ``[N // sequence, sequence]``."""
    return stream[: len(stream) // sequence * sequence].view(-1, sequence)


def next_token_loss(model: PreTrainedModel, batch: Tensor, autocast: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(batch).logits[:, :-1]
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


# results


def save(model: PreTrainedModel, demo: Path) -> None:
    """Write the weights as bfloat16; the model in memory keeps float32."""
    staged = demo.with_name("demo-staged")
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(staged)
    for file in staged.iterdir():
        file.chmod(0o644)
        file.replace(demo / file.name)
    shutil.rmtree(staged)


@torch.no_grad()
def window_losses(model: PreTrainedModel, stream: Tensor, sequence: int) -> Tensor:
    """Mean loss of every window, in nats per token; its first token is not predicted."""
    return torch.stack(
        [next_token_loss(model, batch) for batch in windows(stream, sequence).split(1)]
    )


def unigram_entropy(stream: Tensor) -> float:
    """Entropy of token frequencies, in nats: the best loss of a model without context."""
    share = stream.bincount().double() / len(stream)
    return float(-torch.xlogy(share, share).sum())


def measure(demo: Path, tokens: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
    """The loss of the checkpoint as written (bfloat16 weights, float32 arithmetic) on text it was
    not trained on.
    """
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    held_out = tokens["held_out"]
    losses = {n: float(window_losses(model, held_out, n).mean()) for n in (256, recipe.sequence)}
    seen = windows(tokens["train"], recipe.sequence)[::8].flatten()
    return {
        "tokens": {split: len(stream) for split, stream in tokens.items()},
        "unigram_entropy": round(unigram_entropy(held_out), 4),
        "held_out_loss": {str(n): round(loss, 4) for n, loss in losses.items()},
        "held_out_perplexity": {str(n): round(math.exp(loss), 3) for n, loss in losses.items()},
        "train_loss": round(float(window_losses(model, seen, recipe.sequence).mean()), 4),
    }


if __name__ == "__main__":
    main()
