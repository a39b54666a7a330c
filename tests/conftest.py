"""Fixtures shared by the whole suite."""

import os
from pathlib import Path

import pytest

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
