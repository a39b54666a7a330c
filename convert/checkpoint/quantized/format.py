"""What a quantization format is: which stored tensors make a weight, of what shape, and how."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfold.convert.checkpoint.headers import TensorInfo

if TYPE_CHECKING:
    import torch

Infos = Mapping[str, TensorInfo]  # the stored tensors of a weight, by the end of their names (".weight_scale")
Shape = tuple[int, ...]
Read = Callable[[TensorInfo], "torch.Tensor"]


@dataclass(frozen=True)
class Format:
    """One way to store the weight ``NAME`` + ``dense``: ``NAME`` + ``root``, one of ``dtypes``, and others beside it.

    ``needs`` and ``takes`` are the ends of the names of tensors that must or may be beside the root; ``drops`` those of
    tensors that concern activations or the cache. ``shape(infos, read)`` is the dense shape ``[out, in]``; it raises
    ValueError when the stored shapes do not fit together. ``dequantize(parts, shape, dtype)`` makes the dense tensor.
    ``library`` is the module that it needs, and what to install for it. ``modules(NAME)``: which it is used for.
    ``keeps(infos)``: whether stock classes read the weight beside dense ones that ``modules_to_not_convert`` of the
    config names, so that a result may hold it as it is.
    """

    label: str
    root: str
    dtypes: frozenset[str]
    needs: tuple[str, ...]
    takes: tuple[str, ...]
    drops: tuple[str, ...]
    shape: Callable[[Infos, Read], Shape]
    dequantize: "Callable[[Mapping[str, torch.Tensor], Shape, torch.dtype], torch.Tensor]"
    library: tuple[str, str]
    modules: Callable[[str], bool] = lambda module: True
    dense: str = ".weight"
    keeps: Callable[[Infos], bool] = lambda infos: False

    def holds(self, info: TensorInfo) -> bool:
        """Whether the stored tensor ``info`` is the root of a weight."""
        fits = info.name.endswith(self.root) and info.dtype in self.dtypes
        return fits and self.modules(info.name.removesuffix(self.root))


@dataclass(frozen=True)
class Packed:
    """A weight as it is stored: its format, and its tensors by the end of their names."""

    format: Format
    infos: dict[str, TensorInfo]

    @property
    def root(self) -> TensorInfo:
        return self.infos[self.format.root]


def pack(formats: tuple[Format, ...], tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Packed], list[str]]:
    """The quantized weights among ``tensors`` by their dense names; and the problems found.

    A root belongs to the first of ``formats`` whose dtype and partners it has.
    """
    packed: dict[str, Packed] = {}
    problems = []
    for name, info in tensors.items():
        fitting = [each for each in formats if each.holds(info)]
        if not fitting:
            continue
        candidates = [_gathered(each, name, tensors) for each in fitting]
        found = next((each for each in candidates if each is not None), None)
        if found is None:
            beside = " or ".join(dict.fromkeys(" and ".join(each.needs) for each in fitting))
            problems.append(f"{info.file}: tensor {name!r} is quantized: expected {beside} beside it, found none")
        else:
            packed[name.removesuffix(found.format.root) + found.format.dense] = found
    return packed, problems


def dropped(formats: tuple[Format, ...], name: str) -> bool:
    """Whether the tensor ``name`` concerns quantized activations or a quantized cache: no weight."""
    return any(name.endswith(end) for each in formats for end in each.drops)


def _gathered(form: Format, name: str, tensors: Mapping[str, TensorInfo]) -> Packed | None:
    stem = name.removesuffix(form.root)
    ends = (form.root, *form.needs, *form.takes)
    infos = {end: tensors[stem + end] for end in ends if stem + end in tensors}
    return Packed(form, infos) if all(end in infos for end in form.needs) else None
