"""What `kvfold eval` says of the model that ships as MQA: ``results/evaluate_demo.json``.

python recipes/benchmarks/evaluate_demo.py [--json recipes/results/evaluate_demo.json]
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from measured import conditions

from kvfold.convert import ConvertRequest, EvalRequest, convert_checkpoint
from kvfold.convert.commands.eval_command import format_evaluation
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.eval import eval_checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as work:
        out = Path(work) / "mqa"
        convert_checkpoint(
            ConvertRequest(demo_folder(), out, "mqa", refine=20, samples=8, seq_len=128, quiet=True)
        )
        found = eval_checkpoints(
            EvalRequest(str(demo_folder()), str(out), samples=16, lengths=(256, 512), quiet=True)
        )
    found = replace(found, model="demo", out="mqa")  # no paths of this machine
    print(format_evaluation(found))
    if given.json:
        given.json.write_text(json.dumps({**conditions(), **vars(found)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
