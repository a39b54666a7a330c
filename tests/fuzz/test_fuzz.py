"""Files and command lines that nobody meant: each ends well, or in one clear line and status 2.

``KVFOLD_INPUTS=5000 python -m pytest tests/fuzz --all`` tries that many of each kind, drawn anew.
"""

import json
import os
import re
import resource
import shutil
import struct
from contextlib import suppress

import click
import pytest
import tiny_models
from fuzz.strategies import (
    NAMES,
    TABLES,
    broken_bytes,
    edited_json,
    json_bytes,
    option_values,
    safetensors_files,
)
from helpers import forked
from helpers.checkpoints import read_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from kvfold.convert.checkpoint.headers import read_header
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.cli import kvfold, main
from kvfold.convert.conversion import output, polishing
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain.uptrain_request import UptrainRequest
from kvfold.convert.uptrain.uptraining import STATE, prepare_training_folder

COUNT = int(os.environ.get("KVFOLD_INPUTS", "20"))
FUZZ = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="KVFOLD_INPUTS" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)
CPU_SECONDS = 30
FILE_BYTES = 1 << 28
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
TEXT = "".join(f"Row {row} has {row * row % 89} and {row * 7 % 31}.\n" for row in range(400))
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048}
FOLD = "--to mqa --method mean"
FAMILIES = ("llama", "qwen2", "gpt_neox", "mixtral", "phi3", "gemma3_text")
RUN = "--samples 4 --seq-len 16 --quiet"
COMMANDS = [
    "inspect source",
    "verify result",
    f"convert source out {FOLD} --quiet",
    "convert source out --to mla --kv-rank 8 --rope-dim 4 --method svd --dry-run",
    f"convert source out --to mqa --calibration text.txt {RUN}",
    f"drift source result --text text.txt {RUN}",
    f"sweep source --targets mqa --calibration text.txt {RUN}",
    "recipes",
]
# Options that lead out of the folder, or ask for more work the larger they are.
NOT_DRAWN = {"trust_remote_code", "device", "refine", "polish", "effort", "samples", "seq_len"}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Tiny checkpoints of several families, a result, and the text that commands read."""
    folder = tmp_path_factory.mktemp("seeds")
    for family in FAMILIES:
        (folder / family).mkdir()
        tiny_models.make_tiny(
            family, folder / family, SMALL if family == "llama" else {"vocab_size": 2048}
        )
    (folder / "text.txt").write_text(TEXT)
    words = ["convert", str(folder / "llama"), str(folder / "result"), *FOLD.split(), "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return folder


def run_case(seeds, case, words, family, **files):
    """Run a command in a folder of its own with ``files`` of ``source`` replaced, and judge it."""
    shutil.rmtree(case, ignore_errors=True)
    (case / "log").mkdir(parents=True)
    shutil.copytree(seeds / family, case / "source")
    shutil.copytree(seeds / "result", case / "result")
    shutil.copyfile(seeds / "text.txt", case / "text.txt")
    (case / "folder").mkdir()
    (case / "loop").symlink_to("loop")
    (case / "link").symlink_to("text.txt")
    os.mkfifo(case / "fifo")
    for name, content in files.items():
        (case / "source" / name).write_bytes(content)
    before = forked.snapshot(case / "source")

    def work():
        os.chdir(case)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        main(words)

    end = forked.run(case / "log", work)
    check_end(end, words)
    assert forked.snapshot(case / "source") == before, "the source changed"
    out = case / "out"
    if end.status:
        assert not out.exists(), "an OUT that no conversion finished"
    elif out.exists():
        files_of_record = read_json(out / "kvfold.json")["files"]
        assert {path.name for path in out.iterdir()} == {*files_of_record, "kvfold.json"}


def check_end(end, words):
    """Assert status 0, or status 2 with one last line that says what is wrong."""
    shown = f"{words}: {end.stderr[-1500:]}"
    assert end.status in (0, 2), f"status {end.status}: {shown}"
    assert "Traceback" not in end.stderr, shown
    assert "error: unexpected" not in end.stderr, shown
    assert not CONTROL.search(end.stderr.replace("\r", "") + end.stdout), shown
    errors = [line for line in end.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == (end.status == 2), shown
    if errors:
        unindented = [line for line in end.stderr.splitlines() if not line.startswith("  ")]
        assert unindented[-1] == errors[0], shown


commands = st.sampled_from([line.split() for line in COMMANDS])
families = st.sampled_from(FAMILIES)


@pytest.mark.slow
@settings(FUZZ, max_examples=3 * COUNT)
@given(data=st.data(), words=commands, family=families)
def test_a_file_that_lies_or_is_damaged(seeds, tmp_path_factory, data, words, family):
    names = ["config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json"]
    name = data.draw(st.sampled_from([*names, "tokenizer.json"]))
    stored = (seeds / family / name).read_bytes()
    if name == "model.safetensors":
        changed = data.draw(safetensors_files(stored))
    elif data.draw(st.booleans()):
        changed = json_bytes(data.draw(edited_json(json.loads(stored))))
    else:
        changed = data.draw(broken_bytes(stored))
    case = tmp_path_factory.getbasetemp() / "file"
    run_case(seeds, case, words, family, **{name: changed})


@pytest.mark.slow
@FUZZ
@given(data=st.data(), words=commands)
def test_options_with_any_value(seeds, tmp_path_factory, data, words):
    options = [
        option
        for option in kvfold.get_command(click.Context(kvfold), words[0]).params
        if isinstance(option, click.Option) and option.name not in NOT_DRAWN
    ]
    option = data.draw(st.sampled_from(options))
    value = [] if option.is_flag else [data.draw(option_values)]
    case = tmp_path_factory.getbasetemp() / "options"
    run_case(seeds, case, [*words, option.opts[0], *value], "llama")


@pytest.mark.slow
@FUZZ
@given(data=st.data(), words=commands)
def test_files_with_names_that_are_no_text_or_are_obeyed(seeds, tmp_path_factory, data, words):
    name = data.draw(st.sampled_from(NAMES))
    suffix = data.draw(st.sampled_from([b"", b".json", b".model", b".jinja"]))
    case = tmp_path_factory.getbasetemp() / os.fsdecode(name)
    run_case(seeds, case, words, "llama", **{os.fsdecode(name + suffix): b"{}"})


STATE_FILES = [".journal.json", ".precision", ".text.pt", ".polish.pt"]


@pytest.fixture(scope="module")
def killed_run(seeds, tmp_path_factory):
    """The command of a run that was killed after its last layer, its folder, and a copy of that."""
    case = tmp_path_factory.getbasetemp() / "state"
    line = ["convert", str(seeds / "llama"), str(case / "out"), "--to", "mqa", "--polish", "3"]
    texts = ["--calibration", "self", "--calibration", str(seeds / "text.txt")]
    line += [*texts, *RUN.split()]

    def convert():
        output.complete_output = lambda *_: os._exit(9)
        main(line)

    (case / "log").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polishing, "POLISH_ROUND", 2)  # after which the state is stored
        assert forked.run(case / "log", convert).status == 9
        yield line, case, shutil.copytree(case, case.with_name("state copy"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE_FILES)
@settings(FUZZ, max_examples=max(1, COUNT // 20))  # each trains
@given(data=st.data())
def test_damaged_files_of_a_killed_run(killed_run, data, name):
    """The run starts over, or goes on; either way it ends in the same output."""
    line, case, copy = killed_run
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(copy, case)
    (stored,) = case.glob(f".out.kvfold-*/{name}")
    stored.write_bytes(data.draw(broken_bytes(stored.read_bytes())))
    end = forked.run(case / "log", lambda: main(line))
    check_end(end, line)
    assert end.status == 0, end.stderr
    assert sorted(path.name for path in case.iterdir()) == ["log", "out"]


@pytest.mark.slow
@FUZZ
@given(data=st.data(), name=st.sampled_from(["request.json", f"checkpoint-4/{STATE}"]))
def test_damaged_files_of_a_killed_training(seeds, tmp_path_factory, data, name):
    """A checkpoint that was finished is found, or nothing; or the folder stays and is named."""
    out = tmp_path_factory.getbasetemp() / "training" / "out"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    request = UptrainRequest(str(seeds / "result"), str(out), str(seeds / "text.txt"))
    work = request.training_folder
    source = open_checkpoint(request.model)
    assert prepare_training_folder(request, source) is None
    checkpoint = work / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / STATE).write_text('{"global_step": 4}')
    (work / name).write_bytes(data.draw(broken_bytes((work / name).read_bytes())))
    before = forked.snapshot(work)
    refusal = ""
    try:
        assert prepare_training_folder(request, source) in (checkpoint, None)
    except InputError as error:
        refusal = error.message
    if refusal:
        assert name == "request.json"
        assert f"delete {work} " in refusal or "--fresh" in refusal
        assert forked.snapshot(work) == before


HEADER = json.dumps(TABLES["header"]).encode()


@settings(FUZZ, max_examples=10 * COUNT)
@given(safetensors_files(struct.pack("<Q", len(HEADER)) + HEADER + bytes(40)))
def test_headers_are_read_as_the_safetensors_library_reads_them(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    try:
        expected = {name: bytes(tensor["data"]) for name, tensor in deserialize(data)}
    except (SafetensorError, UnicodeError, OverflowError):
        expected = None
    found = None
    with suppress(InputError):
        tensors = read_header(tmp_path / "x", "x")
        found = {tensor.name: data[tensor.start : tensor.end] for tensor in tensors}
    assert found == expected
