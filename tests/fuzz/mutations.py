"""Changes of a checkpoint's files by their structure, each drawn from a number."""

import io
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Random = random.Random
# Written in place of values that no encoder of JSON writes
RAW = {
    "@@deep": "[" * 100_000 + "]" * 100_000,
    "@@wide": '{"a":' * 300 + "1" + "}" * 300,
    "@@digits": "9" * 5000,
    "@@exponent": "1e400",
    "@@surrogate": '"\\ud800"',
    "@@control": '"a\\u0000\\u001b[2J\\n\\u202e"',
}
ODD: list[Any] = [
    *RAW,
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        0.5,
        -0.5,
        1e-320,
        1e308,
        10**9,
        2**31,
        2**63,
        2**64,
        10**30,
        -(2**63),
    ),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "²",
        "①",
        "64",
        "auto",
        "../x",
        "/etc/passwd",
        "x" * 300,
        "re:(",
        "fp8",
    ),
    *([], {}, [0], [1, 2, 3], ["a"], [[]], [None], {"a": 1}, {"": {}}, [True] * 9),
]
KEYS = [
    "quantization_config",
    "auto_map",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "text_config",
    "files",
]
KEYS += [
    "head_dim",
    "sliding_window",
    "torch_dtype",
    "dtype",
    "vision_config",
    "chat_template",
    "bos_token",
    "format",
]
TEMPLATES = [
    "",
    "{{",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no\nway') }}",
    "{{ messages[9]['content'] }}",
    "{{ 1 / 0 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "\ufeff\x00{{ messages[0].content }}",
    "{% include '/etc/passwd' %}",
]


def change(folder: Path, drawn: Random) -> str:
    """Change one file of the checkpoint in ``folder``, or add one. Returns what was done, for a
    report.
    """
    if drawn.random() < 0.08:
        name = drawn.choice(
            ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "kvfold.json"]
        )
        name = drawn.choice(
            [
                name,
                "README.md",
                "LICENSE",
                "generation_config.json",
                "modeling_x.py",
                "tokenizer.model",
            ]
        )
        name = drawn.choice(
            [name, "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json"]
        )
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(
            drawn.choice([b"", b"{}", b"[]", b"\xff\xfe{\0}\0", b'{"a": 1}', b"---\nlicense: [\n"])
        )
    else:
        files = sorted(
            path.name
            for path in folder.iterdir()
            if path.is_file() and path.stat().st_size < 1 << 30
        )
        # config.json, the index and the weights more often than the many small files beside them
        weights = [
            10 if name == "config.json" else 4 if is_weights(name) or "index" in name else 2
            for name in files
        ]
        name = drawn.choices(files, weights)[0]
    path = folder / name
    kinds = list(ANY)
    if drawn.random() < 0.8:
        kinds = list(KINDS.get(path.suffix, ANY))
    kind = drawn.choice(kinds)
    try:
        said = kind(path, drawn)
    except Exception:  # a file that an earlier change has made one of no kind
        kind = broken
        said = broken(path, drawn)
    return f"{kind.__name__} {name}: {said}"


def is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


# Files of any kind


def broken(path: Path, drawn: Random) -> str:
    """Cut short, spliced, in another encoding."""
    data = path.read_bytes()
    kind = drawn.choice(["cut", "empty", "splice", "utf-16", "bom", "latin", "zeros", "long"])
    at = drawn.randrange(len(data) + 1)
    some = drawn.choice(
        [b"", b"\0", b"\xff", b"{", b"}", b'"', b",", b"NaN", b"-", drawn.randbytes(8)]
    )
    made = {
        "cut": data[:at],
        "empty": b"",
        "splice": data[:at] + some + data[at + drawn.randrange(8) :],
        "utf-16": data.decode("latin-1").encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + data,
        "latin": data.replace(b"a", b"\xe4", 3),
        "zeros": bytes(len(data)),
        "long": data + data,
    }[kind]
    path.write_bytes(made)
    return f"{kind} at byte {at} ({some!r})"


def replaced(path: Path, drawn: Random) -> str:
    """By what is not a regular file of a sensible size in this folder."""
    outside = path.parent.parent / "outside"
    content = path.read_bytes()
    kind = drawn.choice(["fifo", "link", "zero", "circle", "folder", "sparse", "gone"])
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.write_bytes(content)
        os.truncate(path, 2 << 30)  # more than the memory that a command may take
    elif kind != "gone":
        outside.write_bytes(content)
        path.symlink_to({"link": outside, "zero": "/dev/zero", "circle": path.name}[kind])
    return kind


# JSON


def json_changed(path: Path, drawn: Random) -> str:
    """A value replaced, a key dropped, added or written twice."""
    value = json.loads(path.read_text())
    said = ""
    for _ in range(drawn.choice([1, 1, 1, 2])):
        value, part = edited(value, drawn)
        said += part
    path.write_text(raw_text(value))
    return said


def raw_text(value: Any) -> str:
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.replace("@@again", "")


def edited(value: Any, drawn: Random) -> tuple[Any, str]:
    """``value`` with one part of it changed; the place and the change."""
    place = value
    within = value
    said = "$"
    key: Any = None
    for _ in range(drawn.choice([1, 1, 2, 3, 5])):
        keys = (
            list(within)
            if isinstance(within, dict)
            else range(len(within))
            if isinstance(within, list)
            else ()
        )
        if not keys:
            break
        # what has a structure of its own more often
        deep = [4 if isinstance(within[each], dict | list) else 1 for each in keys]
        place = within
        key = drawn.choices(keys, deep)[0]
        within = place[key]
        said = f"{said}[{key!r}]"
    if key is None:
        new = drawn.choice(ODD)
        return new, f"{said} = {new!r} "
    kind = drawn.choice(["replace", "replace", "replace", "near", "drop", "add", "again"])
    if kind == "drop":
        del place[key]
    elif kind == "near" and type(place[key]) in (int, float):
        place[key] = drawn.choice([-1, 0, 2, 0.5, 1e9, 1.0]) * place[key]
    elif kind == "add" and isinstance(place, dict):
        place[key := drawn.choice(KEYS)] = drawn.choice(ODD)
    elif kind == "again" and isinstance(place, dict):
        place[f"{key}@@again"] = drawn.choice(ODD)
    else:
        place[key] = drawn.choice(ODD)
    return value, f"{said} {kind} {place.get(key) if isinstance(place, dict) else ''!r} "[:300]


# Weights


def header_changed(path: Path, drawn: Random) -> str:
    """The JSON of a safetensors header, its length, or the number of bytes after it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    said = ""
    if drawn.random() < 0.6:
        header, said = edited(header, drawn)
    else:
        name = drawn.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
        other = drawn.choice(["F32", "F16", "I64", "F4", "F8_E8M0", "C64", "BOOL"])
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        shapes = [
            shape[::-1],
            [*shape, 1],
            [1, *shape],
            [2**32, 2**32, 0],
            [-1, *shape[1:]],
            [True],
        ]
        places = [
            [begin, end - 4],
            [begin - 4, end - 4],
            [0, end - begin],
            [end, begin],
            [begin, 2**63 - 1],
        ]
        new = drawn.choice(
            [
                {"dtype": other},
                *({"shape": each} for each in shapes),
                *({"data_offsets": each} for each in places),
            ]
        )
        header[name], said = {**entry, **new}, f"{name} {new}"
    text = raw_text(header).encode()
    stated = drawn.choice(
        [len(text)] * 5 + [length, 0, 1, 2**31, 2**63, 2**64 - 1, len(text) + len(body) + 1]
    )
    path.write_bytes(struct.pack("<Q", stated) + text + body)
    return f"{said}, header of {stated} bytes"


def tensor_changed(tensors: dict[str, torch.Tensor], drawn: Random) -> str:
    """One tensor in ``tensors``: other values, another shape, another dtype, another name, or none."""
    name = drawn.choice(sorted(tensors))
    value = tensors[name]
    flat = value.reshape(-1).clone()
    kind = drawn.choice(
        ["nan", "inf", "huge", "zero", "flat", "wider", "empty", "float64", "int", "uint8", "fp8"]
    )
    kind = drawn.choice([kind, kind, "gone", "renamed", "added", "scalar", "tiny"])
    if kind in ("nan", "inf") and flat.is_floating_point() and flat.numel():
        flat[drawn.randrange(flat.numel())] = float(kind)
        tensors[name] = flat.reshape(value.shape)
    elif kind in ("gone", "renamed"):
        del tensors[name]
        if kind == "renamed":
            tensors[
                drawn.choice(
                    [
                        "x",
                        "model.layers.9.self_attn.q_proj.weight",
                        "model",
                        name.upper(),
                        " ",
                        "a\nb",
                    ]
                )
            ] = value
    elif kind == "added":
        tensors[
            drawn.choice(
                ["x.bias", name + "_scale", name.replace(".0.", ".7."), "é\u202e", "x" * 300]
            )
        ] = flat.clone()
    else:
        tensors[name] = {
            "huge": lambda: value * 1e30,
            "tiny": lambda: value * 1e-30,
            "zero": lambda: torch.zeros_like(value),
            "flat": lambda: flat,
            "wider": lambda: torch.cat([value, value]),
            "empty": lambda: flat[:0],
            "scalar": lambda: torch.tensor(1.0),
            "float64": lambda: value.double(),
            "int": lambda: torch.zeros(value.shape, dtype=torch.int32),
            "uint8": lambda: torch.zeros(value.shape, dtype=torch.uint8),
            "fp8": lambda: value.float().to(torch.float8_e4m3fn),
        }.get(kind, lambda: value * 2)()
    return f"{name} {kind}"


def safetensors_changed(path: Path, drawn: Random) -> str:
    values = load_file(path)
    said = tensor_changed(values, drawn)
    save_file({name: value.contiguous() for name, value in values.items()}, path, {"format": "pt"})
    return said


def bin_changed(path: Path, drawn: Random) -> str:
    values = torch.load(path, weights_only=True)
    said = tensor_changed(values, drawn)
    torch.save(values, path)
    return said


class Called:
    """Unpickles as a call of a function by its name."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def nested(flat: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([flat, flat[:1]])


def pickled(path: Path, drawn: Random) -> str:
    """A pickle of something else than plain tensors by their names."""
    values = torch.load(path, weights_only=True)
    name = drawn.choice(sorted(values))
    value = values[name]
    mark = str(path.parent.parent / "executed")
    made = {
        "call": {**values, name: Called(open, mark, "w")},
        "system": {**values, name: Called(os.system, f"touch {mark}")},
        "stride 0": {**values, name: value.reshape(-1)[:1].as_strided([2**20, 2**20], [0, 0])},
        "nested": {**values, name: nested(value.reshape(-1))},
        "sparse": {**values, name: value.reshape(-1).to_sparse()},
        "surrogate": {**values, "\ud800": value},
        "number": {**values, 7: value},
        "list": list(values.values()),
        "tensor": value,
        "deep": {**values, name: {"a": {"b": value}}},
        "transposed": {**values, name: value.t() if value.dim() == 2 else value},
        "meta": {**values, name: value.to("meta")},
        "shared": {**values, name + ".twin": value},
        "long name": {**values, "x\n" * 9: value},
        "parameter": {**values, name: torch.nn.Parameter(value)},
    }
    kind = drawn.choice(sorted(made))
    torch.save(made[kind], path, _use_new_zipfile_serialization=drawn.random() < 0.7)
    return f"{name} {kind}"


def archive_changed(path: Path, drawn: Random) -> str:
    """The zip around a pickle: an entry that unpacks to much, a missing one, a pickle of other
    bytes.
    """
    entries = {}
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    kind = drawn.choice(["bomb", "gone", "bytes", "protocol"])
    at = drawn.choice(sorted(entries))
    if kind == "gone":
        del entries[at]
    elif kind != "bomb":
        entries[at] = drawn.randbytes(40) if kind == "bytes" else pickle.dumps({"a": 1}, 5)
    packing = zipfile.ZIP_DEFLATED if kind == "bomb" else zipfile.ZIP_STORED
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        if kind == "bomb":
            archive.writestr(next(iter(entries)).split("/")[0] + "/data/99", bytes(1 << 24))
    path.write_bytes(buffer.getvalue())
    return f"{kind} {at}"


# Texts beside them


def text_changed(path: Path, drawn: Random) -> str:
    body = drawn.choice(TEMPLATES)
    path.write_text(body)
    return repr(body)


def template_changed(path: Path, drawn: Random) -> str:
    """A chat template in tokenizer_config.json; a key of another file of JSON."""
    value = json.loads(path.read_text())
    value["chat_template"] = body = drawn.choice(
        [*TEMPLATES, [{"name": "default", "template": TEMPLATES[2]}], {}, 3]
    )
    path.write_text(json.dumps(value))
    return f"chat_template {body!r}"


ANY = (broken, replaced)
KINDS: dict[str, tuple[Callable[[Path, Random], str], ...]] = {
    ".json": (
        json_changed,
        json_changed,
        json_changed,
        json_changed,
        json_changed,
        json_changed,
        template_changed,
    ),
    ".safetensors": (header_changed, safetensors_changed, safetensors_changed),
    ".bin": (bin_changed, pickled, pickled, archive_changed),
    ".jinja": (text_changed,),
}
