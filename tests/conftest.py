"""Fixtures shared by the whole suite, and which tests a plain ``pytest`` leaves out."""

import gc
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models

pytest.register_assert_rewrite("helpers")

# The models of the tests are tiny: more threads only wait for each other, and forks have one. Set
# before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run the tests marked slow too (so does any -m)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselects ``gpu`` without a CUDA device, and ``slow`` unless --all, a -m or the name of a
    test asks for it.
    """
    for item in items:
        for fixture in {"reference", "real"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(fixture)
    asked = (
        config.option.all
        or config.option.markexpr
        or any("::" in argument for argument in config.args)
    )
    left_out = [] if asked else ["slow"]
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        left_out += [] if torch.cuda.is_available() else ["gpu"]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=deselected)


def check_message(message):
    """Assert that an error can be printed as one line, followed by one line for each problem."""
    lines = str(message).split("\n")
    assert all(line.strip() for line in lines), message
    assert all(line.startswith("  ") for line in lines[1:]), message
    assert "Traceback" not in lines[0], message


@pytest.fixture
def told():
    """``told(message)`` asserts the form that every error message has."""
    return check_message


@pytest.fixture
def refused():
    """``with refused("--seq-len", field="samples"):`` asserts an error, by default an InputError,
    that blames this field, with these texts in it and of the form that every error has.
    """
    from kvfold.convert.errors import InputError

    @contextmanager
    def expect(*texts, field=None, kind=InputError):
        with pytest.raises(kind) as caught:
            yield caught
        check_message(caught.value)
        assert all(text in str(caught.value) for text in texts), caught.value
        assert field in (None, getattr(caught.value, "field", None))

    return expect


@pytest.fixture(scope="session", autouse=True)
def imported_once():
    """What collecting the tests imported is not looked through at every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def tokenized_once():
    """Equal texts are tokenized once: else the text that ships takes a quarter of every tiny
    calibrated conversion.
    """
    from kvfold.convert.text import windows

    tokenize = windows.tokenize_documents
    made = {}

    def remembered(tokenizer, prefix, documents):
        documents = tuple(documents)
        key = tokenizer.backend_tokenizer.to_str(), tuple(prefix), documents
        if key not in made:
            made[key] = list(tokenize(tokenizer, prefix, documents))
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "tokenize_documents", remembered)
        yield


def folder_of(variable, default, file):
    """The folder that a variable of the environment names, with ``file`` in it, or skip."""
    folder = Path(os.environ.get(variable, default))
    if not (folder / file).is_file():
        pytest.skip(f"no {file} in {folder}; set {variable}")
    return folder


@pytest.fixture(scope="session")
def reference():
    """The folder of the reference checkpoint (``llama-mha/``, ``calibration.txt``,
    ``evaluation.txt``), or skip.
    """
    return folder_of(
        "KVFOLD_REFERENCE", REPOSITORY.parent / "shared" / "reference", "llama-mha/config.json"
    )


@pytest.fixture(scope="session")
def real():
    """The folder of a real language model, as ``recipes/real_models.py checkpoint`` writes it, or
    skip.
    """
    return folder_of("KVFOLD_REAL_MODEL", "", "config.json")


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory):
    """``tiny_family("qwen3", num_key_value_heads=4)``: a folder with a tiny random checkpoint of
    that family, float32, with a tokenizer if ``vocab_size=2048``.

    The same folder for the same arguments: copy it before changing anything.
    """
    made = {}

    def folder(name, **changes):
        tiny_models.skip_unknown(name)
        key = json.dumps([name, changes], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            tiny_models.make_tiny(name, made[key], changes)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def demo_latent(tmp_path_factory):
    """The model that ships in latent attention, 24 + 8 elements per token; copy it to change it."""
    from helpers.checkpoints import run_conversion

    from kvfold.convert import demo_folder

    out = tmp_path_factory.mktemp("demo") / "latent"
    run_conversion(demo_folder(), out, to="mla", kv_rank=24, rope_dim=8, method="svd")
    return out


@pytest.fixture(scope="session")
def tiny_reader(tiny_family):
    """A tiny llama without biases, of two layers, that reads text by the demo tokenizer; copy it to
    change it.

    For what a calibrated conversion does whatever its model knows: it takes a third of the time.
    """
    return tiny_family("llama", vocab_size=2048, attention_bias=False, mlp_bias=False)


@pytest.fixture(scope="session")
def shallow_demo(tmp_path_factory):
    """The model that ships with the first of its four layers alone; copy it to change it."""
    from helpers.checkpoints import edit_json, tensors
    from safetensors.torch import save_file

    from kvfold.convert import demo_folder

    folder = Path(shutil.copytree(demo_folder(), tmp_path_factory.mktemp("shallow") / "demo"))
    edit_json(folder / "config.json", num_hidden_layers=1)
    kept = {
        name: tensor
        for name, tensor in tensors(folder).items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def out(tmp_path):
    """Where a conversion may write: nothing is there yet."""
    return tmp_path / "out"


@pytest.fixture
def kvfold(capfd):
    """``kvfold("inspect", folder, status=0)``: runs a command line in this process, which must end
    in that status; its ``stdout`` and ``stderr``.
    """
    from kvfold.convert.cli import main

    def run(*arguments, status=0):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        shown = capfd.readouterr()
        assert ended.value.code == status, shown.err
        return SimpleNamespace(stdout=shown.out, stderr=shown.err)

    return run
