"""Which Python has which engine; checkpoints that the tests serve."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from helpers.checkpoints import read_json, run_conversion

from kvfold.convert.data import demo_folder

MODULES = {
    "KVFOLD_VLLM_PYTHON": ["vllm"],
    "KVFOLD_MLX_PYTHON": ["mlx_lm"],
    "KVFOLD_LLAMA_CPP_PYTHON": ["llama_cpp_py_sync", "gguf"],
    "KVFOLD_EVAL_PYTHON": ["lm_eval", "peft"],
}
# The last ones are of tiny random models, in layout kvfold.
REQUESTS = read_json(Path(__file__).with_name("requests.json"))
# Of tiny random models; heads of 32 dims are vLLM's least.
SIZES = read_json(Path(__file__).with_name("sizes.json"))


def pytest_collection_modifyitems(items):
    for item in items:
        if {"python_with", "made"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("engines")


@pytest.fixture(scope="session")
def python_with():
    """``python_with("KVFOLD_MLX_PYTHON")``: the Python that the variable names, or this one, if it
    has the engine.
    """

    def find(variable, *also):
        modules = [*MODULES[variable], *also]
        if named := os.environ.get(variable):
            wanted = (
                f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules})))"
            )
            if subprocess.run([named, "-c", wanted], check=False).returncode:
                pytest.skip(f"{named} has not all of {', '.join(modules)}")
            return named
        if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
            pytest.skip(
                f"{missing[0]} is not installed; set {variable} to a Python that has"
                f" {', '.join(modules)}"
            )
        return sys.executable

    return find


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made("gqa-2")``: the folder of the model that ships, converted as ``REQUESTS`` says.

    ``experts-...`` is ``mla-...`` of a tiny random mixtral; other names begin with the family of a
    tiny random source.
    """
    place = tmp_path_factory.mktemp("converted")

    def folder(name):
        first = name.partition("-")[0]
        out = place / name
        family = "mixtral" if first == "experts" else first
        source = place / family if family in ("mixtral", *tiny_models.CLASSICS) else demo_folder()
        if not source.exists():
            tiny_models.make_tiny(
                family, source, SIZES["experts" if family == "mixtral" else "classic"]
            )
        if not out.exists():
            options = {"allow_growth": True} | REQUESTS[name.replace("experts", "mla")]
            run_conversion(source, out, **options)
        return out

    return folder
