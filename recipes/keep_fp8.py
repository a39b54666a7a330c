"""Put the FP8 weights of a source's MLPs back beside converted attention.

    kvfold convert SOURCE OUT ...
    python recipes/keep_fp8.py SOURCE OUT KEPT

`kvfold convert` stores what it dequantizes in ``--dtype``. Here every matrix outside the attention that SOURCE holds in
FP8, with a scale per block, comes back to KEPT with the source's bytes; the rest is OUT's, and config.json names it in
``modules_to_not_convert``. Weights that end in a part of a block stay dense: transformers 5.23 takes the size of a
block from the number of scales and reads them wrongly. KEPT has no ``kvfold.json``: its hashes would be OUT's.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALE = "weight_scale_inv"
LEFT_OUT = ("kvfold.json", "config.json", "model.safetensors.index.json")


class Stored:
    """The tensors of a checkpoint by name, read from its files one at a time."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the source is quantized. Raises SystemExit for anything but FP8 in blocks."""
    settings = config.get("quantization_config") or {}
    if settings.get("quant_method") != "fp8" or not settings.get("weight_block_size"):
        raise SystemExit(f"SOURCE: expected FP8 with weight_block_size, found quantization_config {settings}")
    return settings


def kept(name: str, tensor: Tensor, source: Stored, block: tuple[int, int]) -> dict[str, Tensor]:
    """What stands for OUT's ``tensor`` in KEPT: the source's FP8 weight and its scales, or the tensor as it is."""
    module, _, kind = name.rpartition(".")
    if kind != "weight" or "self_attn" in module or f"{module}.{SCALE}" not in source.files:
        return {name: tensor}
    weight, scale = source[name], source[f"{module}.{SCALE}"]
    if weight.dtype != torch.float8_e4m3fn or weight.shape != tensor.shape:
        return {name: tensor}
    if any(size % side for size, side in zip(weight.shape, block, strict=True)):
        return {name: tensor}
    return {name: weight, f"{module}.{SCALE}": scale}


def shards(source: Stored, out: Path, block: tuple[int, int]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The files of KEPT, one at a time."""
    for path in sorted(out.glob("*.safetensors")):
        made: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            made |= kept(name, tensor, source, block)
        yield path.name, made


def write(source_folder: Path, out: Path, target: Path) -> int:
    """Write KEPT; the number of weights that are FP8 in it."""
    settings = settings_of(json.loads((source_folder / "config.json").read_text()))
    source, block = Stored(source_folder), tuple(settings["weight_block_size"])
    target.mkdir()
    places: dict[str, str] = {}
    dense: list[str] = []
    for file, made in shards(source, out, block):
        save_file(made, target / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
        weights = (name.removesuffix(".weight") for name, each in made.items() if each.dim() == 2)
        dense += [name for name in weights if f"{name}.{SCALE}" not in made and not name.endswith(SCALE)]
    if len({*places.values()}) > 1:
        index = {"metadata": {}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = settings | {"modules_to_not_convert": sorted({"lm_head", *dense})}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in out.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in LEFT_OUT:
            shutil.copyfile(path, target / path.name)
    return sum(name.endswith(SCALE) for name in places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the FP8 checkpoint that OUT was made from")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("target", type=Path, metavar="KEPT")
    args = parser.parse_args()
    print(f"{args.target}: {write(args.source, args.out, args.target)} weights in FP8, as SOURCE holds them")


if __name__ == "__main__":
    main()
