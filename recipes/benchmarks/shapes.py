"""Models in the shapes of 7B and 8B in random weights, for the scripts that measure at these
widths, and processes of their own to measure in.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measured import Row

_WIDE = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
# The sizes of the published models, but for the number of layers.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        **_WIDE,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "llama-3-8b": {
        **_WIDE,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
}
SMALL = 2048  # a vocabulary that hardly counts: that of the tokenizer that ships


def make_model(folder: Path, sizes: dict[str, Any], layers: int = 2, **changes: Any) -> Path:
    """Write a model of ``sizes`` in random weights, bfloat16, with the tokenizer that ships."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from kvfold.convert.data import demo_folder

    values = {**sizes, "num_hidden_layers": layers, "max_position_embeddings": 8192, **changes}
    config = AutoConfig.for_model(**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(folder)
    return folder


def run_in_child(script: str, arguments: list[str], source: Path | None = None) -> tuple[Row, str]:
    """Run ``script`` in a process of its own and one thread, with the code in ``source`` if it is
    given. Return the row that it prints as JSON in its last line, and the lines before.
    """
    folders = [str(source)] if source else []
    folders += [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-P", script, *arguments]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    *lines, row = result.stdout.splitlines()
    return json.loads(row), "\n".join(lines)
