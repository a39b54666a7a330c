"""The student of a conversion: the converted model as a stream of layers, before its checkpoint is complete.

The student always runs from what the file will hold. A candidate for a layer is encoded into the tensors of the
converted checkpoint, rounded to the dtype in which they will be stored, and read back through the same weight map and
the same stock module that will load the finished files::

    transform -> layout.encode -> Twin.put -> read(name), rounded -> WeightMap -> stock module -> error, drift, loss

So an error, a drift or a loss of the walk is one of the written checkpoint, and what refinement trains is what is
stored.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import KvfoldError
from kvfold.convert.io.shards import OutputTensor
from kvfold.convert.io.tensors import torch_dtype
from kvfold.convert.stream.stream import CheckpointStream


class Twin:
    """The student of a conversion, as a stream.

    ``config`` and ``tensors`` are the converted checkpoint's. Tensors that are copied come from the source, the others
    are those last ``put``, both rounded to the dtype that the checkpoint will store. Copied tensors are shared with the
    source's open layer, unless ``recast`` says that the checkpoint will store them in another dtype than the source.
    """

    def __init__(
        self, source: CheckpointStream, config: dict[str, Any], tensors: Iterable[OutputTensor], recast: bool = False
    ) -> None:
        self._planned = {tensor.name: tensor for tensor in tensors}
        self._read_source = source.read
        self._put: Mapping[str, Tensor] = {}
        self._dtypes = {name: torch_dtype(tensor.dtype) for name, tensor in self._planned.items()}
        origins = {name: tensor.sources for name, tensor in self._planned.items() if tensor.sources}
        changed = self._planned.keys() if recast else self._planned.keys() - origins.keys()
        self.stream = type(source)(
            config,
            self._read,
            list(self._planned),
            source.device,
            source.dtype,
            teacher=source,
            changed=changed,
            origins=origins,
            encoded=source.encoded,
        )

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Use a layer's ``tensors``, named and shaped as in the converted checkpoint's files, instead of those before.

        Raises KvfoldError for names that the conversion does not compute.
        """
        unplanned = sorted(name for name in tensors if name not in self._planned or not self._planned[name].computed)
        if unplanned:
            raise KvfoldError(f"the converted checkpoint computes no tensors {', '.join(unplanned)}")
        self._put = dict(tensors)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which the converted checkpoint will store ``name``."""
        return self._dtypes[name]

    def _read(self, name: str) -> Tensor:
        """The tensor that the converted checkpoint will hold under ``name``."""
        planned = self._planned[name]
        if not planned.computed:
            return self._copied(planned).to(self._dtypes[name])
        if name not in self._put:
            raise KvfoldError(f"tensor {name!r} was read before its layer was converted")
        return self._put[name].to(self._dtypes[name])

    def _copied(self, planned: OutputTensor) -> Tensor:
        """A tensor of the source, or several whose elements follow one another; without any zeros."""
        if isinstance(planned.source, str):
            return self._read_source(planned.source)
        parts = [self._read_source(name).flatten() for name in planned.sources]
        return torch.cat(parts).view(planned.shape) if parts else torch.zeros(planned.shape)
