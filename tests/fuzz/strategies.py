"""Hypothesis strategies for inputs that people do not control: JSON, headers, files, options."""

import json
import struct

from helpers.cases import read_cases
from hypothesis import strategies as st

# Values that no encoder of JSON writes; each stands for its mark in the text.
RAW = {
    "@@deep": "[" * 100_000 + "]" * 100_000,
    "@@digits": "9" * 5000,
    "@@exponent": "1e400",
    "@@surrogate": '"\\ud800"',
    "@@control": '"a\\u0000\\u001b[2J\\n\\u202e"',
}
TABLES = read_cases(__file__)
NUMBERS = TABLES["numbers"]
STRINGS = [*TABLES["strings"], "x" * 300, "a b " * 7000]
# Names of folders and files, as bytes: some are no text, or a terminal or a plot obeys them.
NAMES = [
    b"$a$b",
    b"red\x1b[31m",
    b"\xff",
    b"a\nb",
    b"`b`",
    b"-x",
    b"a b",
    "\u202e".encode(),
    b"torch.py",
]

scalars = st.one_of(
    st.sampled_from([None, True, False, float("nan"), float("inf"), *RAW]),
    st.sampled_from(NUMBERS),
    st.sampled_from(STRINGS),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def edited_json(draw, value):
    """A JSON value with one part of it replaced, dropped or added."""
    keys = []
    if isinstance(value, dict):
        keys = sorted(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    if not keys:
        return draw(values)
    key = draw(st.sampled_from(keys))
    changed = value.copy()
    actions = ["replace", "descend", "drop"] + ["add"] * isinstance(value, dict)
    action = draw(st.sampled_from(actions))
    if action == "replace":
        changed[key] = draw(values)
    elif action == "descend":
        changed[key] = draw(edited_json(value[key]))
    elif action == "drop":
        del changed[key]
    else:
        changed[draw(st.sampled_from(TABLES["keys"]))] = draw(values)
    return changed


def json_bytes(value):
    """``value`` as JSON, with the marks of `RAW` replaced."""
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


@st.composite
def broken_bytes(draw, data):
    """A file cut short, spliced, doubled or in another encoding."""
    at = draw(st.integers(0, len(data)))
    return draw(
        st.sampled_from(
            [
                b"",
                data[:at],
                data + data,
                bytes(len(data)),
                b"\xef\xbb\xbf" + data,
                data.decode("latin-1").encode("utf-16"),
                data[:at] + draw(st.binary(max_size=8)) + data[at + draw(st.integers(0, 8)) :],
            ]
        )
    )


@st.composite
def safetensors_files(draw, data):
    """A safetensors file with another header, another stated length, or broken bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(broken_bytes(data))
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    text = json_bytes(draw(edited_json(header)))
    lengths = [length, 0, 1, 2**31, 2**63, 2**64 - 1, len(text) + len(body) + 1]
    stated = draw(st.just(len(text)) | st.sampled_from(lengths))
    return struct.pack("<Q", stated) + text + body


option_values = st.one_of(
    st.sampled_from([str(number) for number in NUMBERS] + ["nan", "1e400", "0x10", "9" * 5000]),
    st.sampled_from(TABLES["words"] + STRINGS),
)
