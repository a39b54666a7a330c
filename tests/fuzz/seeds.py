"""The checkpoints that inputs are made from: a tiny one of every kind that kvfold reads or writes."""

import io
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from helpers import quantized
from helpers.checkpoints import tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvfold.convert.cli import main

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
}
MHA = {**SMALL, "num_key_value_heads": 4}
GQA = {**SMALL, "num_key_value_heads": 2}
PLAIN: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
# The words of a text: rows of 28 to 40 bytes, each of them a token
TEXT = "".join(
    f"Row {row} has {row * row % 89} and {row * 7 % 31}, no more.\n" for row in range(160)
)
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{%"
    " endfor %}"
)
SHORT = ["--calibration", "text.txt", "--samples", "4", "--seq-len", "16"]


@dataclass(frozen=True)
class Seed:
    """A checkpoint, the name of the one that it was converted from, if any, and targets that suit
    it.
    """

    name: str
    source: str | None
    targets: Sequence[Sequence[str]]


FOLDS = [["mqa"], ["gqa", "--kv-heads", "2"]]
LATENT = ["mla", "--kv-rank", "8", "--rope-dim", "4"]
LATENTS = [
    LATENT,
    [*LATENT, "--layout", "engine"],
    [*LATENT, "--layout", "kvfold"],
    ["mla", "--budget", "12"],
]
ALL = [*FOLDS, *LATENTS]
OWN = [[*LATENT, "--layout", "kvfold"]]

# Models of stock classes: family, changes of its tiny config, targets
SOURCES: dict[str, tuple[str, dict[str, Any], list[list[str]]]] = {
    "llama": ("llama", {**MHA, **PLAIN}, ALL),
    "chat": ("llama", {**MHA, **PLAIN}, ALL),
    "sharded": ("mistral", GQA, [["mqa"], *LATENTS]),
    "legacy": ("qwen2", GQA, [["mqa"], *LATENTS]),
    "legacy-shards": ("olmo2", MHA, ALL),
    "norms": ("qwen3", {**GQA, "head_dim": 8}, [["mqa"], *OWN]),
    "experts": (
        "mixtral",
        {**GQA, "num_local_experts": 2, "sliding_window": None},
        [["mqa"], *LATENTS],
    ),
    "windows": ("gemma3_text", {**GQA, "head_dim": 8}, [["mqa"]]),
    "fused": ("phi3", MHA, [*FOLDS, *OWN]),
    "classic": ("gpt_neox", MHA, OWN),
    "fp8": ("llama", {**MHA, **PLAIN}, ALL),
    "int8": ("llama", {**MHA, **PLAIN}, ALL),
    "mxfp4": ("gpt_oss", {**GQA, "head_dim": 8, "num_local_experts": 2}, [["mqa"], *OWN]),
}
# Results of `kvfold convert`, and one of `kvfold uptrain`: source, options
RESULTS: dict[str, tuple[str, list[str]]] = {
    "gqa": ("llama", ["--to", "gqa", "--kv-heads", "2", "--method", "mean"]),
    "mqa": ("sharded", ["--to", "mqa", "--method", "first", "--max-shard-size", "20KB"]),
    "refined": ("llama", ["--to", "mqa", *SHORT, "--refine", "1", "--polish", "1"]),
    "free": ("chat", ["--to", *LATENT, "--method", "svd"]),
    "engine": ("llama", ["--to", *LATENT, *SHORT, "--layout", "engine"]),
    "own": ("classic", ["--to", *LATENT, "--layout", "kvfold", "--method", "svd"]),
    "latent-experts": ("experts", ["--to", *LATENT, "--method", "svd"]),
    "latent-fp8": ("fp8", ["--to", *LATENT, "--method", "svd", "--keep-quantized"]),
    "trained": (
        "free",
        ["--steps", "1", "--batch-tokens", "32", "--seq-len", "16", "--eval-every", "0"],
    ),
}
SEEDS = {
    **{name: Seed(name, None, targets) for name, (_, _, targets) in SOURCES.items()},
    **{name: Seed(name, source, ALL) for name, (source, _) in RESULTS.items()},
}


# Runs of every other command, so that a fork has what each imports
WARM = [
    "drift llama gqa --text text.txt --samples 2 --seq-len 16 --report report",
    "eval llama gqa --text text.txt --lengths 32 --samples 2 --no-retrieval",
    "sweep llama --targets mqa --calibration text.txt --samples 4 --seq-len 16",
    "inspect llama",
    "verify gqa",
]


def make_seeds(folder: Path) -> None:
    """Every seed as a folder in ``folder``, and ``text.txt``, a text that they read. Some seconds."""
    torch.manual_seed(0)
    (folder / "text.txt").write_text(TEXT)
    for name, (family, changes, _) in SOURCES.items():
        (made := folder / name).mkdir()
        tiny_models.make_tiny(family, made, changes)
        add_tokenizer(made)
        (made / "README.md").write_text(
            "---\nlicense: other\nlicense_name: own\ntags: [a, b]\n---\n# A model\n"
        )
    shard(folder / "sharded")
    for name, size in (("legacy", 1 << 30), ("legacy-shards", 30_000)):
        make_legacy(folder / name, size)
    make_chat(folder / "chat")
    for name, write in (
        ("fp8", quantize_fp8),
        ("int8", quantize_int8),
        ("mxfp4", quantized.mxfp4_experts),
    ):
        dense = (folder / name).rename(folder / f"{name}-dense")
        write(dense, folder / name)
        shutil.rmtree(dense)
    before = os.getcwd()
    os.chdir(folder)
    try:
        for name, (source, options) in RESULTS.items():
            command = ["uptrain", "--text", "text.txt"] if name == "trained" else ["convert"]
            run([*command, source, name, *options, "--quiet", "--device", "cpu"])
        for line in WARM:
            run(line.split())
    finally:
        os.chdir(before)
    for path in [
        *folder.glob("*.log"),
        *folder.glob("*-twin"),
        *folder.glob("*.training"),
        folder / "report",
    ]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(words: list[str]) -> None:
    """A command in this process. AssertionError unless it ends well."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0, f"{words}: {said.getvalue()}"


def add_tokenizer(folder: Path) -> None:
    """One token per byte: small, so that a change hits what matters."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    letters = {
        letter: 3 + at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=special | letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def shard(folder: Path, parts: int = 3) -> None:
    """The tensors of ``folder`` in several files with an index."""
    names = sorted(values := tensors(folder))
    (folder / "model.safetensors").unlink()
    files = {
        f"model-{part + 1:05}-of-{parts:05}.safetensors": names[part::parts]
        for part in range(parts)
    }
    for file, some in files.items():
        save_file({name: values[name] for name in some}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def make_legacy(folder: Path, size: int) -> None:
    """The tensors of ``folder`` as pickles, several with an index if they take more than ``size``
    bytes.
    """
    values = tensors(folder)
    (folder / "model.safetensors").unlink()
    groups: list[dict[str, torch.Tensor]] = [{}]
    for name, value in values.items():
        if sum(each.nbytes for each in groups[-1].values()) > size:
            groups.append({})
        groups[-1][name] = value
    if len(groups) == 1:
        torch.save(groups[0], folder / "pytorch_model.bin")
        return
    files = [f"pytorch_model-{part + 1:05}-of-{len(groups):05}.bin" for part in range(len(groups))]
    for file, group in zip(files, groups, strict=True):
        torch.save(group, folder / file)
    weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def make_chat(folder: Path) -> None:
    """Everything that may lie beside the weights of a chat model."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2], "top_p": 0.9})
    )
    (folder / "LICENSE").write_text("Do what you like.\n")
    (folder / "added_tokens.json").write_text("{}")


def quantize_fp8(source: Path, out: Path) -> None:
    quantized.quantized_copy(
        source, out, quantized.fp8_settings((16, 16)), quantized.fp8_blocks((16, 16))
    )


def quantize_int8(source: Path, out: Path) -> None:
    """As compressed-tensors stores it, with a scale per output channel."""

    def quantize(weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        stored = (weight / scale).round().to(torch.int8)
        return {".weight": stored, ".weight_scale": scale}, stored * scale

    weights = {
        "num_bits": 8,
        "type": "int",
        "strategy": "channel",
        "symmetric": True,
        "group_size": None,
    }
    groups = {"group_0": {"targets": ["re:.*proj"], "weights": weights, "format": "int-quantized"}}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
    }
    quantized.quantized_copy(source, out, settings, quantize)
