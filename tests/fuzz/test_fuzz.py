"""Random files in the place of a checkpoint's: each is read, or refused in words within seconds, and nothing else.

``python -m pytest tests/fuzz`` draws 600 inputs or a few more, ``KVFOLD_INPUTS=20000`` before it 20,000. An input fails
when kvfold raises anything but its own errors, takes more than five seconds of CPU or hangs, or writes a file in the
test's folder or any below. A call that hangs is stopped, and fails alone.
"""

import copy
import json
import os
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.headers import parse_header
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import KvfoldError
from kvfold.convert.measure.inspect import inspect_checkpoint
from kvfold.convert.measure.verify import recorded_problems
from kvfold.convert.recipes import read_recipe
from kvfold.convert.text.corpus import open_corpus

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

SECONDS, WAITING = 5, 120  # of CPU, and by the clock, for one input: a call that waits for ever takes no CPU
TESTS = 7  # that share the inputs
many = hypothesis.settings(
    max_examples=-(-int(os.environ.get("KVFOLD_INPUTS", "600")) // TESTS),
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)

odd_numbers = st.sampled_from([0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**30, -(2**63), 1e308, -0.5, 1e-320])
words = st.sampled_from(
    ["", " ", "llama", "../x", "/etc/passwd", "a\0b", "\ud800", "\u202e", "x" * 300, "NaN", "{layer}", "F32", "I64"]
)
scalars = st.one_of(st.none(), st.booleans(), odd_numbers, st.integers(), st.floats(), words, st.text(max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(words | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


class Stopped(BaseException):
    """Raised inside a call that hangs; no ``except Exception`` holds it."""


def stop(number: int, frame: object) -> None:
    raise Stopped(f"a call took more than {WAITING} s")


def survives(read: Callable[[], object], where: Path) -> bool:
    """True if ``read`` returns, False when it raises an error of kvfold. Anything else fails."""
    before, lines, began = listing(where), [], time.process_time()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(WAITING)
    try:
        read()
    except KvfoldError as error:
        lines = [error.message, *error.details]
        # An error's lines are lines, and short enough to be read.
        assert lines[0].strip()
        assert not any("\n" in line for line in lines)
        assert max(map(len, lines)) < 20_000
    finally:
        signal.alarm(0)
    assert time.process_time() - began < SECONDS
    assert listing(where) == before
    return not lines


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every file and folder beside ``folder`` and below, with its size and the time of its last change."""
    found = ((str(path), path.lstat()) for path in folder.parent.rglob("*"))
    return sorted((name, state.st_size, state.st_mtime_ns) for name, state in found)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """``value`` with the part at ``path`` (numbers, taken modulo what there is) replaced by ``new``."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not path or not keys:
        return new
    result, key = copy.copy(value), keys[path[0] % len(keys)]
    result[key] = replaced(value[key], path[1:], new)
    return result


paths = st.lists(st.integers(0, 200), min_size=1, max_size=3)
changes = st.lists(st.tuples(paths, values), min_size=1, max_size=3)
splices = st.lists(st.tuples(st.integers(0, 1500), st.binary(max_size=60), st.integers(0, 40)), max_size=3)


def changed(value: Any, made: list[tuple[list[int], Any]]) -> Any:
    for path, new in made:
        value = replaced(value, path, new)
    return value


def spliced(text: bytes, made: list[tuple[int, bytes, int]]) -> bytes:
    """``text`` with bytes at some places, modulo its length, in place of some others."""
    for at, some, dropped in made:
        start = at % (len(text) + 1)
        text = text[:start] + some + text[start + dropped :]
    return text


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files the tests write over."""
    return Path(shutil.copytree(demo_folder(), tmp_path_factory.mktemp("fuzz") / "model"))


CONFIG = json.loads((demo_folder() / "config.json").read_bytes())


TARGETS: list[dict[str, Any]] = [
    {"to": "gqa", "kv_heads": 4},
    {"to": "mqa", "method": "mean"},
    {"to": "mqa", "calibration": "self", "polish": 50},
    {"to": "mla", "kv_rank": 24, "rope_dim": 8},
    {"to": "mla", "kv_rank": 24, "rope_dim": 8, "layout": "engine"},
    {"to": "mla", "kv_rank": 24, "rope_dim": 8, "layout": "kvfold", "q_rank": 32},
    {"to": "mla", "budget": 64, "refine": "auto"},
]


@pytest.mark.slow
@many
@hypothesis.given(changes, splices, st.sampled_from(TARGETS))
def test_configs(folder: Path, made: Any, splices: Any, target: dict[str, Any]) -> None:
    """Configs that differ a little, what is read of them and what a conversion would make of them."""
    request = ConvertRequest(str(folder), str(folder.parent / "out"), dry_run=True, device="cpu", **target)

    def plan() -> None:
        planned = convert_checkpoint(request)
        json.dumps(planned.to_dict())
        planned.summary()

    (folder / "config.json").write_bytes(spliced(encoded(changed(CONFIG, made)), splices))
    survives(lambda: inspect_checkpoint(str(folder)), folder)
    (folder / "config.json").write_bytes(encoded(changed(CONFIG, made)))
    survives(plan, folder)


@pytest.fixture(scope="module")
def latent(demo_latent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A latent model, whose config is compared with its tensors."""
    out = Path(shutil.copytree(demo_latent, tmp_path_factory.mktemp("latent") / "out"))
    (out / "kvfold.json").unlink()
    shutil.copyfile(out / "config.json", out / "whole.json")
    return out


@many
@hypothesis.given(changes)
def test_configs_of_latent_models(latent: Path, made: Any) -> None:
    (latent / "config.json").write_bytes(encoded(changed(json.loads((latent / "whole.json").read_bytes()), made)))
    survives(lambda: inspect_checkpoint(str(latent)), latent)


ENTRIES = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    "__metadata__": {"format": "pt"},
}
lengths = st.one_of(st.none(), st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]), st.integers(0, 400))


def file_of(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(40)


@st.composite
def headers(draw: Any) -> bytes:
    """Entries changed, a length that is not the header's, or a file cut short."""
    data = file_of(encoded(changed(ENTRIES, draw(changes))), draw(lengths))
    return data[: len(data) - draw(st.sampled_from([0, 0, 0, 1, 8, 40, 50]))]


MEMBERS = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in ENTRIES.items()]
ODD_MEMBERS = [
    *MEMBERS,
    MEMBERS[0].replace("a", "\\u0061", 1),  # another spelling of the same name
    MEMBERS[0].replace("{", '{"dtype": "F32", ', 1),
    MEMBERS[0].replace("2, 3", "3, 2"),
    '"d": {"dtype": "U8", "shape": [0], "data_offsets": [40, 40]}',
]
SPLICES = [b"-", b"0", b".0", b"e0", b" ", b",", b'"', b"\\", b"{", b"}", b"NaN", b"\0", b"\xef\xbb\xbf", b"9" * 5000]


@st.composite
def odd_headers(draw: Any) -> bytes:
    """Names and keys twice, and what no encoder of JSON writes."""
    members = list(MEMBERS)
    for member in draw(st.lists(st.sampled_from(ODD_MEMBERS), max_size=2)):
        members.insert(draw(st.integers(0, 4)), member)
    text, replacing = f"{{{', '.join(members)}}}".encode(), draw(st.booleans())
    pieces = st.tuples(st.integers(0, 300), st.sampled_from(SPLICES) | st.binary(max_size=4))
    made = draw(st.lists(pieces, max_size=2))
    return file_of(spliced(text, [(at, some, len(some) if replacing else 0) for at, some in made]))


@many
@hypothesis.given(headers() | odd_headers())
def test_headers_as_the_safetensors_library_reads_them(folder: Path, data: bytes) -> None:
    """What the library takes is taken, and what it refuses refused."""
    survives(lambda: agrees_with_the_library(data), folder)


def agrees_with_the_library(data: bytes) -> None:
    from safetensors import SafetensorError, deserialize

    header = parse_header("x", len(data), lambda start, count: data[start : start + count])
    try:
        taken = sorted(name for name, _ in deserialize(data))
    except (SafetensorError, UnicodeError, OverflowError):
        taken = None
    if not header.problems:
        assert taken is not None, "the library refuses what kvfold takes"
        assert taken == sorted(tensor.name for tensor in header.tensors)
    elif taken is not None:
        allowed = ["must hold exactly dtype, shape and data_offsets", "the name", "surrogate", "must be one of"]
        if data[8:9] != b"{":  # the format asks for it there, the library takes spaces before it
            allowed.append("its header must be a JSON object")
        assert any(reason in problem for problem in header.problems for reason in allowed), header.problems


@many
@hypothesis.given(changes)
def test_indices(folder: Path, made: Any) -> None:
    """Of two shards that an unchanged index opens."""
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    index = {"metadata": {"total_size": 40}, "weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
    sharded = folder.parent / "sharded"
    sharded.mkdir(exist_ok=True)
    shutil.copyfile(demo_folder() / "config.json", sharded / "config.json")
    for name, held in zip(names, ("ab", "c"), strict=True):
        entries = {key: {**ENTRIES[key], "data_offsets": [0, 8]} if key == "c" else ENTRIES[key] for key in held}
        content = file_of(encoded(entries))
        (sharded / name).write_bytes(content[: len(content) - (8 if held == "ab" else 32)])
    told = changed(index, made)
    (sharded / "model.safetensors.index.json").write_bytes(encoded(told))
    opened = survives(lambda: open_checkpoint(sharded).close(), sharded)
    assert opened or told != index


TOML = b'to = "mla"\nkv_rank = 48\nrope_dim = 16\nrefine = "auto"\n[about]\nmodel = "a/b"\nsaving = 0.5\n'
ODD = [b"\n", b"=", b"[[a]]", b'"""', b"1979-05-27", b"9" * 5000, b"nan", b"[", b"\xff", b"{a={a=", b"#"]
pieces = st.tuples(st.integers(0, 100), st.binary(max_size=20) | st.sampled_from(ODD), st.integers(0, 10))


@many
@hypothesis.given(st.lists(pieces, min_size=1, max_size=3))
def test_recipes(folder: Path, made: list[tuple[int, bytes, int]]) -> None:
    path = folder.parent / "recipe.toml"
    path.write_bytes(spliced(TOML, made))
    survives(lambda: read_recipe(str(path)), folder)


said = values.map(lambda value: {"messages": [value]}) | values.map(lambda value: {"text": value}) | values
rows_of_text = st.lists(said.map(encoded) | st.binary(max_size=20) | st.sampled_from(ODD), max_size=4)


@many
@hypothesis.given(rows_of_text)
def test_rows_of_text_and_of_messages(folder: Path, rows: list[bytes]) -> None:
    path = folder.parent / "rows.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "a"}', *rows]))
    survives(lambda: open_corpus(str(path), lambda given: given[0]["content"], 0).documents(10**6), folder)


@many
@hypothesis.given(changes, st.booleans())
def test_records(folder: Path, made: Any, is_bytes: bool) -> None:
    record = {"format": 3, "files": {"config.json": "0" * 64, "x": "y"}, "tensors": {}}
    content = b"\xff" + encoded(record) if is_bytes else encoded(changed(record, made))
    (folder / "kvfold.json").write_bytes(content)
    survives(lambda: recorded_problems(folder), folder)
    (folder / "kvfold.json").unlink()
