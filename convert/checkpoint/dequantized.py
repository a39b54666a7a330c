"""A quantized checkpoint seen as the dense one it stands for.

Whoever gets these ``Weights`` sees plain tensors with plain names, dtypes and shapes. A tensor is dequantized when it
is read, and never cached.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.folder import DEQUANTIZE, raise_problems
from kvfold.convert.checkpoint.formats import (
    Format,
    StoredWeight,
    compressed_formats,
    fp8_formats,
    mxfp4_formats,
    stored_weights,
)
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.json_text import with_dtype
from kvfold.convert.checkpoint.reader import Reader, Weights
from kvfold.convert.errors import InputError

if TYPE_CHECKING:
    import torch

_KEYS = ("quantization_config", "compression_config")
_FORMATS: dict[str, Callable[[Mapping[str, Any]], tuple[Format, ...]]] = {
    "fp8": fp8_formats,
    "fbgemm_fp8": fp8_formats,
    "compressed-tensors": compressed_formats,
    "mxfp4": mxfp4_formats,
}


def undeclared_problems(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Problems: quantized tensors of a checkpoint whose config does not say how they are quantized."""
    if any(config.get(key) for key in _KEYS):
        return []
    return [
        f"{info.file}: tensor {name!r} is quantized: expected F16, BF16, F32 or F64, found {info.dtype}; {DEQUANTIZE}"
        for name, info in tensors.items()
        if _is_quantized(info)
    ]


def dequantized(weights: Weights, dtype: str, where: str) -> Weights:
    """``weights`` as dense ones, their floats in the safetensors ``dtype``; plain weights are returned unchanged.

    Raises InputError for a quantization that is not supported, and for tensors that do not follow the config's.
    """
    key = next((key for key in _KEYS if weights.config.get(key)), None)
    if key is None:
        return weights
    settings = weights.config[key]
    formats = _formats(key, settings, where)
    stored, problems = stored_weights(formats, weights.tensors)
    used = {info.name for weight in stored.values() for info in weight.parts.values()}
    drops = tuple(end for each in formats for end in each.drops)
    plain = {name: info for name, info in weights.tensors.items() if name not in used and not name.endswith(drops)}
    tensors: dict[str, TensorInfo] = {}
    for name, weight in stored.items():
        root = weight.root
        try:
            shape = weight.format.shape(weight.parts)
        except ValueError as error:
            problems.append(f"{root.file}: tensor {root.name!r} is quantized: {error}")
            continue
        end = root.start + tensor_bytes(dtype, shape)
        tensors[name] = TensorInfo(name, dtype, shape, root.file, root.start, end, "dequantized")
    # roots that lack their other tensors are among the problems of stored_weights already
    problems += [
        f"{info.file}: tensor {name!r} is quantized in another way than {key} says, found {info.dtype}"
        for name, info in plain.items()
        if _is_quantized(info) and not any(each.is_root(info) for each in formats)
    ]
    if not stored and not problems:
        problems = [f"{where}: {key} says that the weights are quantized, found none that is; remove that key"]
    raise_problems(problems)
    for name, info in plain.items():
        cast = info.dtype in FLOAT_DTYPES and info.dtype != dtype
        end = info.start + tensor_bytes(dtype, info.shape)
        tensors[name] = replace(info, dtype=dtype, end=end, made="cast") if cast else info
    # a config that still said quantized would make every reader look for scales
    config = {name: value for name, value in weights.config.items() if name not in _KEYS}
    labels = [weight.format.label for weight in stored.values()]
    return Weights(
        with_dtype(config, TORCH_NAMES[dtype]),
        dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))),
        DequantizingReader(weights.reader, stored, plain, settings),
        tuple(
            f"{labels.count(label)} weights stored as {label}, dequantized to {TORCH_NAMES[dtype]}"
            for label in dict.fromkeys(labels)
        ),
    )


def _formats(key: str, settings: Any, where: str) -> tuple[Format, ...]:
    method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
    found = f"{where}: quantized checkpoint ({key}, method {method!r})"
    if not isinstance(method, str) or method not in _FORMATS:
        raise InputError(f"{found}; expected plain weights, or one of {', '.join(_FORMATS)}; {DEQUANTIZE}")
    try:
        return _FORMATS[method](settings)
    except ValueError as error:
        raise InputError(f"{found}: {error}; {DEQUANTIZE}") from None


def _is_quantized(tensor: TensorInfo) -> bool:
    """True for low-precision floats, and for integers that are weights (masks and positions are integer buffers)."""
    if tensor.dtype == "F4" or tensor.dtype.startswith(("F8_", "F6_")):
        return True
    packed = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")
    return tensor.dtype[0] in "IU" and tensor.name.endswith(packed)


@dataclass(frozen=True)
class DequantizingReader(Reader):
    """Reads dense tensors: ``weights`` are dequantized, ``plain`` ones cast. Both are keyed by their dense names.

    ``settings`` is the quantization_config of config.json.
    """

    stored: Reader
    weights: dict[str, StoredWeight]
    plain: dict[str, TensorInfo]
    settings: Mapping[str, Any]

    def keepable(self, name: str) -> StoredWeight | None:
        """The weight as it is stored, if a result may hold it in that form (``--keep-quantized``)."""
        weight = self.weights.get(name)
        return weight if weight is not None and weight.format.keeps(weight.parts) else None

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.checkpoint.tensors import cast_chunk, torch_dtype

        dtype = torch_dtype(info.dtype)
        if info.name in self.plain:
            tensor = self.stored.read(self.plain[info.name])
            return tensor if tensor.dtype == dtype else cast_chunk(tensor, dtype, info.name)
        weight = self.weights[info.name]
        parts = {end: self.stored.read(part) for end, part in weight.parts.items()}
        try:
            return weight.format.dequantize(parts, info.shape, dtype)
        except ImportError as error:
            raise _missing(weight.format) from error
        except ValueError as error:
            raise InputError(f"{info.file}: tensor {weight.root.name!r} is quantized: {error}") from error

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        return super().chunks(info, elements) if info.made else self.stored.chunks(info, elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None if info.made else self.stored.raw_path(info)

    def close(self) -> None:
        self.stored.close()


def can_keep_quantized(reader: Reader) -> bool:
    """True if the files hold weights that ``--keep-quantized`` can leave as they are."""
    return isinstance(reader, DequantizingReader) and any(map(reader.keepable, reader.weights))


def check_libraries(reader: Reader) -> None:
    """Raises InputError if a library that ``reader`` needs is not installed."""
    if not isinstance(reader, DequantizingReader):
        return
    for form in {weight.format.label: weight.format for weight in reader.weights.values()}.values():
        try:
            installed = find_spec(form.library[0]) is not None
        except ModuleNotFoundError:  # the package that the module is in
            installed = False
        if not installed:
            raise _missing(form)


def _missing(form: Format) -> InputError:
    module, requirement = form.library
    return InputError(
        f"weights stored as {form.label}: expected {module.partition('.')[0]} to dequantize them, found none that can; "
        f"pip install '{requirement}'"
    )
