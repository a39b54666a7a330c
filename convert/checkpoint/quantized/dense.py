"""A quantized checkpoint seen as the dense one that it stands for.

Everything behind ``Weights`` sees plain tensors with plain names, dtypes and shapes; a tensor is dequantized when it is
read, and dropped with whoever read it. No other module knows of quantization.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.folder import DEQUANTIZE
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.json_text import dtype_changes, edit_config
from kvfold.convert.checkpoint.quantized.compressed_tensors import compressed_formats
from kvfold.convert.checkpoint.quantized.format import Format, Packed, dropped, pack
from kvfold.convert.checkpoint.quantized.fp8 import fp8_formats
from kvfold.convert.checkpoint.quantized.mxfp4 import mxfp4_formats
from kvfold.convert.checkpoint.reader import Reader, Weights, flat_chunks
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


def quantization(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key of config.json that says how the weights are quantized, and its value; None for plain weights."""
    return next(((key, config[key]) for key in _KEYS if config.get(key)), None)


def dequantized(weights: Weights, dtype: str, where: str) -> Weights:
    """``weights`` as dense ones, their floats in the safetensors ``dtype``; plain weights as they are.

    Raises InputError for a method that is not read here, and for tensors that are not those of the method.
    """
    if (found := quantization(weights.config)) is None:
        return weights
    formats = _formats(*found, where)
    packed, problems = pack(formats, weights.tensors)
    used = {info.name for each in packed.values() for info in each.infos.values()}
    plain = {name: info for name, info in weights.tensors.items() if name not in used and not dropped(formats, name)}
    tensors: dict[str, TensorInfo] = {}
    for name, each in packed.items():
        try:
            tensors[name] = _dense(name, dtype, each.format.shape(each.infos, weights.reader.read), each.root)
        except ValueError as error:
            problems.append(f"{each.root.file}: tensor {each.root.name!r} is quantized: {error}")
    problems += [
        f"{info.file}: tensor {name!r} is quantized in another way than {found[0]} says, found {info.dtype}"
        for name, info in plain.items()
        if is_quantized(info) and not any(each.holds(info) for each in formats)
    ]
    if not packed and not problems:
        problems = [f"{where}: {found[0]} says that the weights are quantized, found none that is; remove that key"]
    if problems:
        raise InputError(problems[0], problems[1:])
    for name, info in plain.items():
        tensors[name] = _cast(info, dtype)
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)))
    return Weights(
        _dense_config(weights.config, dtype),
        ordered,
        DequantizingReader(weights.reader, packed, plain, found[1]),
        (*weights.made_of, *_made_of(packed, dtype)),
    )


def keeps_quantized(reader: Reader) -> bool:
    """Whether the files hold weights as ``--keep-quantized`` leaves them beside dense ones."""
    return isinstance(reader, DequantizingReader) and any(map(reader.keepable, reader.packed))


def check_libraries(reader: Reader) -> None:
    """Raises InputError when a library that ``reader`` needs is not installed."""
    if isinstance(reader, DequantizingReader):
        for form in {each.format.label: each.format for each in reader.packed.values()}.values():
            if not _installed(form.library[0]):
                raise _missing(form)


@dataclass(frozen=True)
class DequantizingReader:
    """Dense tensors of ``packed`` weights, and ``plain`` ones in the dtype that is asked for, by their dense names.

    ``settings`` are those of config.json.
    """

    stored: Reader
    packed: dict[str, Packed]
    plain: dict[str, TensorInfo]
    settings: Mapping[str, Any]

    def keepable(self, name: str) -> Packed | None:
        """The weight with the dense ``name`` as it is stored, where a result may hold it so."""
        packed = self.packed.get(name)
        return packed if packed is not None and packed.format.keeps(packed.infos) else None

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.checkpoint.tensors import cast_chunk, torch_dtype

        dtype = torch_dtype(info.dtype)
        if info.name in self.plain:
            tensor = self.stored.read(self.plain[info.name])
            return tensor if tensor.dtype == dtype else cast_chunk(tensor, dtype, info.name)
        packed = self.packed[info.name]
        parts = {end: self.stored.read(part) for end, part in packed.infos.items()}
        try:
            return packed.format.dequantize(parts, info.shape, dtype)
        except ImportError as error:
            raise _missing(packed.format) from error
        except ValueError as error:
            raise InputError(f"{info.file}: tensor {packed.root.name!r} is quantized: {error}") from error

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        return flat_chunks(self.read(info), elements) if info.made else self.stored.chunks(info, elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None if info.made else self.stored.raw_path(info)

    def close(self) -> None:
        self.stored.close()


def is_quantized(tensor: TensorInfo) -> bool:
    """Low-precision floats always; integers only as weights (masks and positions are integer buffers)."""
    if tensor.dtype == "F4" or tensor.dtype.startswith(("F8_", "F6_")):
        return True
    packed = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")
    return tensor.dtype[0] in "IU" and tensor.name.endswith(packed)


def plain_problems(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Problems: quantized tensors of a checkpoint whose config does not say how they are quantized."""
    return [
        f"{info.file}: tensor {name!r} is quantized: expected F16, BF16, F32 or F64, found {info.dtype}; {DEQUANTIZE}"
        for name, info in tensors.items()
        if is_quantized(info)
    ]


def _formats(key: str, settings: Any, where: str) -> tuple[Format, ...]:
    method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
    found = f"{where}: quantized checkpoint ({key}, method {method!r})"
    if not isinstance(method, str) or method not in _FORMATS:
        raise InputError(f"{found}; expected plain weights, or one of {', '.join(_FORMATS)}; {DEQUANTIZE}")
    try:
        return _FORMATS[method](settings)
    except ValueError as error:
        raise InputError(f"{found}: {error}; {DEQUANTIZE}") from None


def _dense(name: str, dtype: str, shape: tuple[int, ...], root: TensorInfo) -> TensorInfo:
    return TensorInfo(name, dtype, shape, root.file, root.start, root.start + tensor_bytes(dtype, shape), "dequantized")


def _cast(info: TensorInfo, dtype: str) -> TensorInfo:
    if info.dtype not in FLOAT_DTYPES or info.dtype == dtype:
        return info
    return replace(info, dtype=dtype, end=info.start + tensor_bytes(dtype, info.shape), made="cast")


def _dense_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    dense = {key: value for key, value in config.items() if key not in _KEYS}
    return edit_config(dense, dtype_changes(dense, TORCH_NAMES[dtype]))


def _made_of(packed: Mapping[str, Packed], dtype: str) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for each in packed.values():
        counts[each.format.label] = counts.get(each.format.label, 0) + 1
    return tuple(f"{n} weights stored as {label}, dequantized to {TORCH_NAMES[dtype]}" for label, n in counts.items())


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _missing(form: Format) -> InputError:
    module, requirement = form.library
    return InputError(
        f"weights stored as {form.label}: expected {module.partition('.')[0]} to dequantize them, found none that can; "
        f"pip install '{requirement}'"
    )
