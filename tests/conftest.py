"""Fixtures shared by the whole suite."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models

pytest.register_assert_rewrite("helpers")

# The models of the tests are tiny: more threads only wait for each other. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of the reference checkpoint (``llama-mha/``, ``calibration.txt``, ``evaluation.txt``), or skip."""
    folder = Path(os.environ.get("KVFOLD_REFERENCE", REPOSITORY.parent / "shared" / "reference"))
    if not (folder / "llama-mha" / "config.json").is_file():
        pytest.skip(f"no reference checkpoint in {folder}; set KVFOLD_REFERENCE to its folder")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "reference" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.reference)


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_family("qwen3", num_key_value_heads=4)``: a folder with a tiny random checkpoint of that family, float32.

    The same folder for the same arguments: copy it before changing anything.
    """
    made: dict[str, Path] = {}

    def folder(name: str, **changes: Any) -> Path:
        key = json.dumps([name, changes], sort_keys=True)
        if key not in made:
            path = tmp_path_factory.mktemp(name)
            tiny_models.make_tiny(name, path, changes)
            made[key] = path
        return made[key]

    return folder
