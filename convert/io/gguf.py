"""GGUF, llama.cpp's format: read through gguf and through transformers' own table of names and reorderings.

A GGUF file has no config.json: transformers makes one from its metadata. They do not tell everything (how RoPE is
scaled, nor which layers have a window), so that a config.json beside the file goes before them.
"""

import hashlib
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.errors import InputError, first_line
from kvfold.convert.io.config import dtype_changes, edit_config
from kvfold.convert.io.folder import INDEX, LEGACY_INDEX, LEGACY_SINGLE, SINGLE
from kvfold.convert.io.headers import TORCH_NAMES, TensorInfo, tensor_bytes
from kvfold.convert.io.reader import Weights, flat_chunks

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_ELEMENTS = 1 << 22  # dequantized at a time, in float32
_ROPE = ("rope_freqs.", "rope_factors_")  # tensors: how the RoPE of a model with a long context is scaled


def gguf_file(names: list[str], wanted: str | None, folder: Path) -> str | None:
    """The GGUF file to read among the files ``names`` of a folder, None to read other weights.

    ``wanted`` names it; without that it is read when it is the only one and there are no other weights. Raises
    InputError when there is no such file, when it is a part of one, or when there are several.
    """
    present = [name for name in names if name.endswith(SUFFIX)]
    if wanted is not None:
        inside = Path(wanted).name if Path(wanted).resolve().parent == folder else wanted
        if inside not in present:
            found = ", ".join(present[:5]) or "no GGUF file"
            raise InputError(f"--gguf {wanted}: expected a GGUF file in {folder}, found {found}")
        present = [inside]
    elif not present or any(name in names for name in (SINGLE, INDEX, LEGACY_SINGLE, LEGACY_INDEX)):
        return None
    if len(present) > 1:
        found = ", ".join(present[:5])
        raise InputError(
            f"{folder}: expected one GGUF file, found {len(present)} of them: {found}; give the one to read as MODEL"
        )
    if _PART.search(present[0]):
        raise InputError(
            f"{folder / present[0]}: expected a whole file, found a part; join them by llama-gguf-split --merge"
        )
    return present[0]


def read_gguf(path: Path, name: str, config: dict[str, Any] | None, dtype: str) -> tuple[Weights, str]:
    """The tensors of a GGUF file under the names of ``transformers``, in ``dtype``; and the sha256 of its header.

    ``name`` is that of the file in its folder, ``config`` the config.json beside it, None without one. Raises
    InputError: gguf is not installed, or the file is damaged or of an architecture that transformers does not read.
    """
    if find_spec("gguf") is None:
        raise InputError(f"{path}: expected gguf to read it, found it not installed; pip install 'kvfold[gguf]'")
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        read, file = load_gguf_checkpoint(str(path))["config"], GGUFReader(path)
    except Exception as error:  # both let errors of every kind through
        found = first_line(error)
        if "support" not in found:
            found = f"a damaged or incomplete one ({found}); download or convert it again"
        raise InputError(f"{path}: expected a GGUF file that transformers reads, found: {found}") from None
    stored = {tensor.name: tensor for tensor in file.tensors}
    if config is None:
        _check_rope(path, file)
        config = _config(read)
    architecture = bytes(file.fields["general.architecture"].parts[-1]).decode()
    tensors, names = _tensors(name, config, architecture, read, stored, dtype)
    reader = GgufReader(names, stored, architecture, read, getattr(file.data, "_mmap", None))
    kinds = ", ".join(sorted({stored[name].tensor_type.name for name in names.values()}))
    made_of = f"{name} ({kinds}), dequantized to {TORCH_NAMES[dtype]}"
    config = edit_config(config, dtype_changes(config, TORCH_NAMES[dtype]))
    return Weights(config, tensors, reader, (made_of,)), _digest(path, int(file.data_offset))


@dataclass(frozen=True)
class GgufReader:
    """Tensors of a GGUF file: ``names`` in it by those of transformers, and ``stored``, mapped into memory.

    ``config`` is what transformers makes of the metadata: its processors undo llama.cpp's reorderings by it. ``mapped``
    is the memory map, whose pages are given back after each tensor: the file never counts as memory.
    """

    names: Mapping[str, str]
    stored: Mapping[str, Any]
    architecture: str
    config: Mapping[str, Any]
    mapped: mmap.mmap | None

    def read(self, info: TensorInfo) -> "torch.Tensor":
        made = self._dense(info)
        if self.mapped is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on every system
            self.mapped.madvise(mmap.MADV_DONTNEED)
        return made

    def _dense(self, info: TensorInfo) -> "torch.Tensor":
        import numpy as np
        import torch
        from gguf import dequantize

        from kvfold.convert.io.tensors import torch_dtype

        dtype, tensor = torch_dtype(info.dtype), self.stored[self.names[info.name]]
        if self._is_reordered(tensor):
            made = self._process(tensor.name, dequantize(tensor.data, tensor.tensor_type))
            return torch.from_numpy(np.ascontiguousarray(made)).to(dtype).reshape(info.shape)
        dense = torch.empty(info.shape, dtype=dtype)
        rows = dense if dense.ndim > 1 else dense[None]
        data = tensor.data if dense.ndim > 1 else tensor.data[None]
        at_once = max(1, _ELEMENTS // max(1, prod(rows.shape[1:])))
        for first in range(0, len(rows), at_once):
            some = dequantize(data[first : first + at_once], tensor.tensor_type)
            rows[first : first + at_once] = torch.from_numpy(np.array(some)).reshape(
                rows[first : first + at_once].shape
            )
        return dense

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        return flat_chunks(self.read(info), elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None

    def close(self) -> None:
        pass

    def _is_reordered(self, tensor: Any) -> bool:
        """Whether transformers does anything to the values or their order: a tensor of one repeated element tells."""
        import numpy as np

        probe = np.broadcast_to(np.float32(1), tuple(int(size) for size in reversed(tensor.shape)))
        return self._process(tensor.name, probe) is not probe

    def _process(self, name: str, values: Any) -> Any:
        return processor(self.architecture, self.config).process(values, name).weights


def processor(architecture: str, config: Mapping[str, Any]) -> Any:
    """What transformers does to the tensors of an architecture."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)


def _tensors(
    file: str,
    config: Mapping[str, Any],
    architecture: str,
    read: Mapping[str, Any],
    stored: Mapping[str, Any],
    dtype: str,
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The dense tensors in the order of their bytes, and their names in the file."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    model = _empty_model(file, config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    known = get_gguf_hf_weights_map(model, processor(architecture, read))
    tensors: dict[str, TensorInfo] = {}
    names: dict[str, str] = {}
    problems = []
    for name, tensor in stored.items():
        if name.startswith(_ROPE):
            continue
        dense = known.get(name)
        if dense is None or dense not in shapes or dense in tensors:
            problems.append(f"tensor {name!r}: expected one that {type(model).__name__} stores as such, found none")
            continue
        shape, start = shapes[dense], int(tensor.data_offset)
        if prod(shape) != int(tensor.n_elements):
            size = [int(size) for size in reversed(tensor.shape)]
            problems.append(f"tensor {name!r}: expected {list(shape)} by the config, found {size}")
            continue
        tensors[dense] = TensorInfo(dense, dtype, shape, file, start, start + tensor_bytes(dtype, shape), "dequantized")
        names[dense] = name
    if problems:
        raise InputError(f"{file}: {problems[0]}", problems[1:])
    return dict(sorted(tensors.items(), key=lambda item: item[1].start)), names


def _empty_model(path: str, config: Mapping[str, Any]) -> Any:
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        parsed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.device("meta"):
            return MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)](parsed)
    except Exception as error:  # transformers' classes raise whatever their validation does
        raise InputError(f"{path}: expected a causal language model, found: {first_line(error)}") from None


def _config(read: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers would save it for what it read from the metadata."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = read["model_type"]
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"a GGUF file of model type {kind!r}: expected a causal language model, found none of that name"
        )
    values = {key: value for key, value in read.items() if key != "_model_name_or_path"}
    saved: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(values).to_diff_dict()
    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "model_type": kind} | saved


def _check_rope(path: Path, file: Any) -> None:
    """Raises InputError for a RoPE scaling, which transformers does not read from metadata."""
    tensor = next((each.name for each in file.tensors if each.name.startswith(_ROPE)), None)
    key = next((name for name in file.fields if ".rope.scaling." in name), None)
    if tensor or key:
        raise InputError(
            f"{path}: expected a config.json beside it, for how its RoPE is scaled ({tensor or key}) is not in the "
            "metadata that transformers reads, found none; put the model's config.json into the folder"
        )


def _digest(path: Path, length: int) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()
