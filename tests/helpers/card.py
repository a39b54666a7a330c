"""A GPU that is only pretended: tensors lie on a device of their own, and the CPU computes them.

An operation on tensors of the card and of the CPU fails, as on a real one. Importing this module
registers the device with torch for the whole process.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from kvfold.convert.conversion import layers, splits
from kvfold.convert.transforms.latent import slots

_setup_privateuseone_for_python_backend()
CARD = torch.device("privateuseone", 0)
# Their indices may be on the CPU.
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
_MOVING = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class CardTensor(Tensor):
    """A tensor on the pretended card, with the tensor ``inner`` of the CPU that holds its data."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=CARD
        )

    def __init__(self, inner):
        self.inner = inner.resolve_conj().resolve_neg()

    def tolist(self):
        return self.inner.tolist()

    def __getitem__(self, index):
        if any(isinstance(value, Tensor) for value in tree_flatten(index)[0]):
            return super().__getitem__(index)
        return CardTensor(self.inner[strip(index)])

    def __setitem__(self, index, value):
        self.inner[strip(index)] = strip(value)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class PretendCard(TorchDispatchMode):
    """While it is active, tensors can be made on the pretended card and moved to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class MakeOnHost(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU and then moves them to their device: torch does
    it in C++, where no mode sees it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(
                args[0].device
            )
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def strip(values):
    """Return ``values`` with the CPU's tensors in place of the card's."""
    return tree_map(lambda value: value.inner if isinstance(value, CardTensor) else value, values)


def run(func, args, kwargs):
    """Return what ``func`` returns on the CPU, on the card if its tensors are there. Raises
    RuntimeError if only some are.
    """
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    on_card = [isinstance(tensor, CardTensor) for tensor in tensors]
    if any(on_card) and func not in _MOVING and not (func in _INDEXING and on_card[0]):
        for tensor, there in zip(tensors, on_card, strict=True):
            if not there and tensor.dim():
                raise RuntimeError(f"{func}: tensors on the card and on the CPU")
    device = kwargs.get("device")
    to_card = any(on_card) if device is None else torch.device(device).type == CARD.type
    if func is torch.ops.aten.copy_.default:
        to_card = on_card[0]
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = strip((args, kwargs))
    result = func(*args, **kwargs)
    if not to_card:
        return result
    return tree_map(lambda value: CardTensor(value) if isinstance(value, Tensor) else value, result)


def fit_on_card():
    """Make conversions in this process survey and fit layers on the pretended card."""

    def fit(method, layer, device):
        def measure_error(weights):
            with _disable_current_modes():  # the student stays on the CPU
                return layer.measure_error(weights)

        with PretendCard(), MakeOnHost():
            return fit_on_device(method, replace(layer, measure_error=measure_error), CARD)

    def survey(weights, statistics, *others):
        with PretendCard(), MakeOnHost():
            weights, statistics = weights.to(CARD), statistics.to(CARD)
            return survey_layer(linearize_norms(weights, statistics), statistics, *others)

    fit_on_device = layers.fit_on_device
    survey_layer = slots.survey_layer
    linearize_norms = splits.linearize_norms
    layers.fit_on_device = fit
    slots.survey_layer = survey
    splits.linearize_norms = lambda weights, statistics: weights
