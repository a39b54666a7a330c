"""The names that users import: listed, documented, lazy."""

import importlib
from importlib.metadata import version

import pytest
from helpers.processes import run_python

import kvfold.attention
import kvfold.convert
from kvfold.convert import ConvertRequest, InputError, KvfoldError, errors

PACKAGES = (kvfold.convert, kvfold.attention)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_dir_lists_the_public_names_alone(package):
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert name == "__version__" or getattr(package, name).__doc__, name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_name_that_is_none_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'melt'"):
        _ = package.melt


def test_version():
    assert kvfold.convert.__version__ == version("kvfold")


def test_errors_can_be_caught_without_importing_a_module_path():
    assert issubclass(InputError, KvfoldError)
    with pytest.raises(KvfoldError, match="--to gqa needs --kv-heads"):
        ConvertRequest(model="m", out="o", to="gqa")


def test_errors_name_keywords_where_no_command_runs(monkeypatch):
    monkeypatch.setitem(errors._wording, "command", False)
    with pytest.raises(InputError) as caught:
        ConvertRequest(model="m", out="o", to="gqa", kv_rank=4)
    assert "--" not in str(caught.value)
    assert str(caught.value).startswith("to='gqa' needs kv_heads: ")
    with errors.worded_for_commands():
        assert str(InputError("--to gqa needs --kv-heads")) == "--to gqa needs --kv-heads"
    assert str(InputError("--to gqa needs --kv-heads", ["--samples 0"])) == "to='gqa' needs kv_heads\n  samples=0"


@pytest.mark.parametrize(
    ("message", "keywords"),
    [
        ("--rope-dim 4: no rotary embedding; expected 0", "rope_dim=4: no rotary embedding; expected 0"),
        ("--text some.txt: no file", "text='some.txt': no file"),
        ("--recipe 'x': found none", "recipe='x': found none"),
        ("found a folder; --overwrite replaces it", "found a folder; overwrite=True replaces it"),
        ("give --calibration FILE, or --samples or --seq-len", "give calibration=FILE, or samples or seq_len"),
        ("use --layout free; see `kvfold convert --help`", "use layout='free'; see `kvfold convert --help`"),
        ("give --spill DIR: kvfold convert BASE OUT --spill a", "give spill=DIR: kvfold convert BASE OUT --spill a"),
        ("expected MODEL or a --shape, one of both", "expected MODEL or a shape, one of both"),
        ("run it with `--trust-remote-code`", "run it with `trust_remote_code=True`"),
    ],
)
def test_options_in_keywords(message, keywords):
    assert errors.in_keywords(message) == keywords


def test_importing_the_packages_imports_nothing_heavy():
    script = (
        "import sys, kvfold.convert, kvfold.attention; dir(kvfold.convert); dir(kvfold.attention);"
        "kvfold.convert.ConvertRequest; kvfold.convert.InputError; kvfold.convert.inspect_checkpoint;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'click') if name in sys.modules])"
    )
    done = run_python("-c", script)
    assert done.stdout == "[]\n"


def test_what_the_request_takes_is_said_by_its_types():
    request = importlib.import_module("kvfold.convert.request")
    assert request.TARGETS == ("gqa", "mqa", "mla")
    assert request.DEVICES == ("auto", "cpu", "cuda")
    assert request.LAYOUTS == ("free", "engine", "kvfold")
    for to in request.TARGETS:
        assert set(request.methods_of(to)) <= set(request.METHODS)
