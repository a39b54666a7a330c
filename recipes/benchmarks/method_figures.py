"""The figures of ``docs/method.md``, one for each idea, measured on the model that ships.

python recipes/benchmarks/method_figures.py docs/figures
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from kvfold.convert import Conversion, ConvertRequest, convert_checkpoint, drift_checkpoints
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.figures import (
    Chart,
    by_place,
    gain_by_layer,
    latent_spectrum,
    rotary_charts,
)

TEXT: dict[str, Any] = {"samples": 16, "seq_len": 256}  # of calibration
DRIFT: dict[str, Any] = {"samples": 4, "seq_len": 256}
TARGETS: dict[str, dict[str, Any]] = {
    "mean": {"to": "gqa", "kv_heads": 2, "method": "mean"},
    "principal": {"to": "gqa", "kv_heads": 2, **TEXT},
    "latent": {"to": "mla", "kv_rank": 32, "rope_dim": 32, **TEXT},
}


def converted(work: Path) -> dict[str, Conversion]:
    """The conversions; their outputs are in ``work``."""
    return {
        name: convert_checkpoint(
            ConvertRequest(model=demo_folder(), out=work / name, quiet=True, **options)
        )
        for name, options in TARGETS.items()
    }


def head_figure(work: Path) -> Chart:
    """Error of each layer's attention on the source's inputs: heads shared by their mean and by
    `principal`.
    """
    lines = {}
    for name in ("mean", "principal"):
        layers = drift_checkpoints(demo_folder(), work / name, **DRIFT).measured.layers
        lines[name] = [layer.attention_local for layer in layers]
    return by_place("Error of each layer's attention with 2 of 8 heads, by method", lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the figures go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvfold-figures-") as work:
        done = converted(Path(work))
        worth = done["latent"].rotary_worth
        spectrum = done["latent"].latent_spectrum
        assert worth is not None  # the conversion read text
        assert spectrum is not None
        figures = {
            "shared-head": head_figure(Path(work)),
            "rotation": rotary_charts(worth)[0],
            "latent": latent_spectrum(spectrum),
            "output-fit": gain_by_layer(done["principal"]),
        }
    for name, chart in figures.items():
        assert chart is not None, name  # principal fits the output
        chart.save(str(folder / f"{name}.svg"))
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
