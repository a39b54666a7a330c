"""Whether stored tensors are those of their config's class: tried on the meta device, where nothing is read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.errors import InputError, one_line
from kvfold.convert.stream.skeleton import empty_model
from kvfold.convert.stream.weight_map import WeightMap, WeightSource

_LONGEST = 200  # characters of another library's error text


def check_fits(weights: WeightMap, stored: Mapping[str, TensorInfo], origin: str) -> None:
    """Raises InputError when ``stored`` lacks a parameter of ``weights``, or makes one of another shape."""
    if problems := _misfits(weights, stored):
        raise InputError(f"{origin}: its tensors are not those of its config.json", problems)


def misfits(config: dict[str, object], stored: Mapping[str, TensorInfo]) -> list[str]:
    """A line for every parameter of the stock class of ``config`` that ``stored`` lacks or has in another shape.

    Raises InputError when transformers cannot build the class.
    """
    return _misfits(WeightMap(empty_model(config, torch.float32), stored), stored)


def _misfits(weights: WeightMap, stored: Mapping[str, TensorInfo]) -> list[str]:
    problems = []
    try:
        weights.under("")
    except InputError as error:
        problems += [f"missing: {name}" for name in error.details]
    for source in weights.sources.values():
        if problem := _misfit(weights, source, stored):
            problems.append(problem)
    return problems


def _misfit(weights: WeightMap, source: WeightSource, stored: Mapping[str, TensorInfo]) -> str:
    def read(name: str) -> Tensor:
        return torch.empty(stored[name].shape, dtype=torch_dtype(stored[name].dtype), device="meta")

    try:
        weights.load(source, read, torch.float32, "meta")
    except InputError as error:
        return error.message
    except (RuntimeError, ValueError, IndexError) as error:  # a converter that joins tensors which do not go together
        return f"{', '.join(source.names[:3])}: do not make {source.target}: {one_line(error)[:_LONGEST]}"
    return ""
