"""Present a quantized checkpoint as the equivalent dense one, dequantizing a tensor each time it is
read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.files import with_dtype
from kvfold.convert.checkpoint.folder import CONFIG, DEQUANTIZE, raise_problems
from kvfold.convert.checkpoint.formats import FORMATS, Format, StoredWeight, stored_weights
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.reader import Checkpoint, Reader
from kvfold.convert.errors import InputError, short

if TYPE_CHECKING:
    import torch

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def undeclared_problems(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """List the quantized tensors of a checkpoint whose config does not say how they are quantized,
    one problem each.
    """
    if any(config.get(key) not in (None, {}) for key in _QUANTIZATION_KEYS):
        return []
    return [
        f"{info.file}: tensor {name!r} of dtype {info.dtype} is quantized, but {CONFIG} does not"
        " say how; use the unquantized checkpoint"
        for name, info in tensors.items()
        if _is_quantized(info)
    ]


def dequantized(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """``checkpoint`` as a dense one with floats in the safetensors ``dtype``. InputError if that is
    not possible.
    """
    key = next(
        (key for key in _QUANTIZATION_KEYS if checkpoint.config.get(key) not in (None, {})), None
    )
    if key is None:
        return checkpoint
    where = checkpoint.hub_id or checkpoint.folder
    settings = checkpoint.config[key]
    method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(
            f"{where}: {key} {short(method)} is not supported (supported: {known}); {DEQUANTIZE}"
        )
    try:
        formats = FORMATS[method](settings)
    except ValueError as error:
        raise InputError(
            f"{where}: {key} {method!r} cannot be read: {error}; {DEQUANTIZE}"
        ) from None
    stored, problems = stored_weights(formats, checkpoint.tensors)
    used = {info.name for weight in stored.values() for info in weight.parts.values()}
    drops = tuple(end for each in formats for end in each.drops)
    plain = {
        name: info
        for name, info in checkpoint.tensors.items()
        if name not in used and not name.endswith(drops)
    }
    tensors: dict[str, TensorInfo] = {}
    for name, weight in stored.items():
        try:
            shape = weight.format.shape(weight.parts)
        except ValueError as error:
            problems.append(
                f"{weight.root.file}: quantized tensor {weight.root.name!r}: {error}; {DEQUANTIZE}"
            )
            continue
        end = weight.root.start + tensor_bytes(dtype, shape)
        tensors[name] = TensorInfo(
            name, dtype, shape, weight.root.file, weight.root.start, end, "dequantized"
        )
    # roots that lack their other tensors are among the problems of stored_weights already
    problems += [
        f"{info.file}: tensor {name!r} of dtype {info.dtype} is not quantized as {key} says;"
        f" {DEQUANTIZE}"
        for name, info in plain.items()
        if _is_quantized(info) and not any(each.is_root(info) for each in formats)
    ]
    if not stored and not problems:
        problems = [
            f"{where}: {key} says that the weights are quantized, but they are not; remove it from"
            f" {CONFIG}"
        ]
    raise_problems(problems)
    for name, info in plain.items():
        cast = info.dtype in FLOAT_DTYPES and info.dtype != dtype
        end = info.start + tensor_bytes(dtype, info.shape)
        tensors[name] = replace(info, dtype=dtype, end=end, made="cast") if cast else info
    # a config that still said quantized would make every reader look for scales
    config = {
        name: value for name, value in checkpoint.config.items() if name not in _QUANTIZATION_KEYS
    }
    labels = Counter(weight.format.label for weight in stored.values())
    return replace(
        checkpoint,
        config=with_dtype(config, TORCH_NAMES[dtype]),
        tensors=dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))),
        reader=DequantizingReader(checkpoint.reader, stored, plain, settings),
        made_of=tuple(
            f"{count} weights stored as {label}, dequantized to {TORCH_NAMES[dtype]}"
            for label, count in labels.items()
        ),
    )


def _is_quantized(tensor: TensorInfo) -> bool:
    """True for low-precision floats and integer weights, but not for integer buffers such as masks
    and positions.
    """
    if tensor.dtype == "F4" or tensor.dtype.startswith(("F8_", "F6_")):
        return True
    packed = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")
    return tensor.dtype[0] in "IU" and tensor.name.endswith(packed)


class DequantizingReader(Reader):
    """Reads tensors by their dense names: dequantizes those in ``weights``, and casts those in
    ``plain``.
    """

    def __init__(
        self,
        stored: Reader,
        weights: Mapping[str, StoredWeight],
        plain: Mapping[str, TensorInfo],
        settings: Mapping[str, Any],
    ) -> None:
        self.stored = stored
        self.weights = weights
        self.plain = plain
        self.settings = settings
        self.raw = stored.raw
        self.keepable = {
            name: weight for name, weight in weights.items() if weight.format.keeps(weight.parts)
        }

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
            raise InputError(
                f"{info.file}: quantized tensor {weight.root.name!r}: {error}"
            ) from error

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        return super().chunks(info, elements) if info.made else self.stored.chunks(info, elements)

    def close(self) -> None:
        self.stored.close()


def check_libraries(reader: Reader) -> None:
    """Raise InputError if a library that ``reader`` needs is not installed."""
    weights = reader.weights.values() if isinstance(reader, DequantizingReader) else ()
    for form in {weight.format.label: weight.format for weight in weights}.values():
        try:
            installed = find_spec(form.library[0]) is not None
        except ModuleNotFoundError:  # the package that the module is in
            installed = False
        if not installed:
            raise _missing(form)


def _missing(form: Format) -> InputError:
    module, requirement = form.library
    needed = f"dequantizing weights stored as {form.label} requires {module.partition('.')[0]}"
    return InputError(f"{needed}; run pip install '{requirement}'")
