"""The rows of ``serve_check.py`` as a table: ``python recipes/serve/table.py
recipes/results/engines.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any


def name_of(row: dict[str, Any]) -> str:
    layout = f", layout {row['layout']}" if row["layout"] else ""
    experts = f" of a tiny {row['source']}" if row["model_type"] == "mistral4" else ""
    windows = f" of {row.get('source', row['checkpoint'])}" if row.get("prompts_of") else ""
    return f"{row['attention']}{layout}{experts}{windows}"


def cell(row: dict[str, Any]) -> str:
    if row["verdict"] == "refused":
        return f"refused: {row['message'].split(': ', 1)[-1].rstrip('.')}"
    text = f"{row['verdict']}, {row['tokens_equal']}; cache {row['cache']:g}"
    return text if row["verdict"] == "equal" else f"**{text}**"


def engine_of(row: dict[str, Any]) -> str:
    options = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in row["options"].items())
    return f"{row['engine']}, {options}" if options else row["engine"]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| engine | checkpoint | greedy tokens against transformers, cache elements per token"
            " per layer |"
        ),
        "|---|---|---|",
    ]
    ordered = sorted(rows, key=lambda row: (engine_of(row), -row["cache_promised"], name_of(row)))
    return "\n".join(
        [*lines, *(f"| {engine_of(row)} | {name_of(row)} | {cell(row)} |" for row in ordered)]
    )


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"]))
