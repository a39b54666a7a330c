"""What TransMLA's own code loses on a model, before any training, by the protocol of
recipes/real_models.py.

    git clone https://github.com/fxmeng/TransMLA
    python -m venv peer && peer/bin/pip install torch transformers==4.52.4 datasets
    peer/bin/python recipes/benchmarks/peer_transmla.py TransMLA/transmla MODEL \\
        --calibration FILE --text FILE --kv-rank 128 --rope-dim 64 \\
        --json recipes/results/transmla.json

Its converter runs as it is, on 64 x 256 tokens of FILE in place of a downloaded dataset, for every
value of its setting `freqfold` that it accepts, or those named: the best by the held-out text is
reported, in its favor. The file is written after every one, and goes on where it has rows of the
same model and sizes. Needs no kvfold.
"""

import argparse
import datetime
import json
import lzma
import platform
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

WINDOWS = 24
LENGTH = 256
SAMPLES = 64
BATCH = 4
CODE = Path(__file__).resolve().parents[2] / "convert" / "data" / "held_out.txt.xz"


def windows(tokenizer: Any, text: str, count: int) -> Tensor:
    """The first ``count`` windows of ``text``, ``[count, LENGTH]``."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: count * LENGTH]
    return torch.tensor(ids).view(count, LENGTH)


@torch.no_grad()
def log_probs(model: Any, rows: Tensor) -> Tensor:
    """Of every next token, ``[n (T - 1), V]``."""
    mask = torch.ones_like(rows)
    logits: Tensor = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1).flatten(0, 1)


def compare(model: Any, result: Any, tokens: Tensor) -> dict[str, float]:
    """Excess loss and KL of ``result`` against ``model``, nats per token, and top-1 agreement."""
    excess = kl = agree = 0.0
    for rows in tokens.split(BATCH):
        expected = log_probs(model, rows)
        found = log_probs(result, rows)
        excess += float((expected - found).gather(1, rows[:, 1:].flatten()[:, None]).sum())
        kl += float(torch.nn.functional.kl_div(found, expected, reduction="sum", log_target=True))
        agree += float((expected.argmax(-1) == found.argmax(-1)).sum())
    count = tokens.shape[0] * (LENGTH - 1)
    return {"excess": excess / count, "kl": kl / count, "top_1_agreement": agree / count}


def converted(
    model: Any, loader: list[dict[str, Tensor]], freqfold: int, args: argparse.Namespace
) -> Any:
    """``model`` after TransMLA's two steps; the model itself is not changed."""
    from lora_qkv import low_rank_qkv
    from partial_rope import partial_rope

    collapse = model.config.head_dim // args.rope_dim
    moved = partial_rope(deepcopy(model), None, loader, None, freqfold=freqfold, collapse=collapse)
    settings = {"q_lora_rank": None, "use_qkv_norm": False, "balance_kv_ratio": 1.0}
    sizes = {"qk_mqa_dim": args.rope_dim, "collapse": collapse, "kv_lora_rank": args.kv_rank}
    return low_rank_qkv(moved, None, loader, None, **settings, **sizes)


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the rows of a results file have in common."""
    return {"model": args.model.name, "kv_rank": args.kv_rank, "rope_dim": args.rope_dim}


def told(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The content of the results file."""
    best = min(rows, key=lambda row: float(row["text"]["excess"]))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    conditions = {
        "date": date,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    return {**sizes_of(args), "best": best, "rows": rows, **conditions}


def earlier(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that the results file holds of the same model and sizes."""
    if args.json is None or not args.json.is_file():
        return []
    found = json.loads(args.json.read_text(encoding="utf-8"))
    same = all(found[key] == value for key, value in sizes_of(args).items())
    rows: list[dict[str, Any]] = found["rows"] if same else []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("transmla", type=Path, help="the folder `transmla` of a clone")
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv-rank", type=int, default=128)
    parser.add_argument("--rope-dim", type=int, default=64)
    parser.add_argument("--freqfold", type=int, nargs="+", help="default: every value it accepts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(args.transmla / "transmla"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(args.model / "tokenizer.json")
    )  # also newer files
    model = AutoModelForCausalLM.from_pretrained(
        args.model, torch_dtype=torch.float32, attn_implementation="sdpa"
    )
    texts = {
        "text": args.text.read_text(encoding="utf-8"),
        "code": lzma.decompress(CODE.read_bytes()).decode(),
    }
    tokens = {name: windows(tokenizer, text, WINDOWS) for name, text in texts.items()}
    calibration = windows(tokenizer, args.calibration.read_text(encoding="utf-8"), SAMPLES)
    loader = [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in calibration.split(8)
    ]
    fewest = model.config.head_dim // args.rope_dim
    most = model.config.head_dim // 2
    rows = earlier(args)
    wanted = args.freqfold or [1 << power for power in range(16) if fewest <= 1 << power <= most]
    for freqfold in sorted({*wanted} - {row["freqfold"] for row in rows}):
        result = converted(model, loader, freqfold, args)
        rows.append(
            {
                "freqfold": freqfold,
                **{name: compare(model, result, each) for name, each in tokens.items()},
            }
        )
        print(rows[-1], flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(told(rows, args), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
