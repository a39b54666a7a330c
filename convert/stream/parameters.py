"""The parameters of a stock model, read from a checkpoint when they are needed and dropped after."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.errors import InputError
from kvfold.convert.stream.weight_map import Read, WeightMap, WeightSource


class Parameters:
    """The tensors of ``model`` (on the meta device) from the checkpoint that ``read`` and ``names`` stand for.

    Parameters stay loaded until ``release``. ``teacher`` are those of a model over the same files: what it has
    loaded is shared, but for what is made of stored tensors named in ``changed``, which ``read`` gives otherwise.
    ``origins``: what ``read`` puts together or renames, with the teacher's stored tensors that it is made of.
    """

    def __init__(
        self,
        model: Any,
        read: Read,
        names: Iterable[str],
        device: torch.device,
        dtype: torch.dtype,
        teacher: "Parameters | None" = None,
        changed: Collection[str] = (),
        origins: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.map = WeightMap(model, names)
        self.read, self.device, self.dtype = read, device, dtype
        self._teacher = teacher if teacher is not None and teacher.dtype == dtype else None
        self._changed, self._origins = changed, origins or {}
        self._loaded: dict[WeightSource, dict[str, Tensor]] = {}
        self._tables: dict[str, Tensor] = {}

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The parameters whose names begin with ``prefix``, under what is left of their names."""
        loaded: dict[str, Tensor] = {}
        for source in self.map.under(prefix):
            loaded.update(self._load(source))
        return {name.removeprefix(prefix): tensor for name, tensor in loaded.items()}

    def named(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The parameters ``names``; tied ones come from each other."""
        sources = {name: self.map.source_of(name) for name in names}
        return {name: self._load(source)[source.target] for name, source in sources.items()}

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Some ``rows [n]`` of a table ``[V, E]``: of the table itself only the stored tensor stays in memory."""
        if name not in self._tables:
            source = self.map.source_of(name)
            if source.converter is not None:
                raise InputError(
                    f"{name} is stored in parts ({', '.join(source.names[:3])}); embeddings must be one tensor"
                )
            self._tables[name] = self.read(source.names[0])
        table = self._tables[name]
        return table[rows.to(table.device)].to(self.device, self.dtype)

    def load(self, source: WeightSource) -> dict[str, Tensor]:
        """The parameters of ``source`` from the tensors that ``read`` returns now, neither shared nor cached."""
        return self.map.load(source, self.read, self.dtype, self.device)

    def release(self) -> None:
        """Drop what has been loaded."""
        self._loaded.clear()
        self._tables.clear()

    @property
    def empty(self) -> bool:
        """Whether nothing is loaded."""
        return not self._loaded and not self._tables

    def _load(self, source: WeightSource) -> dict[str, Tensor]:
        if source not in self._loaded:
            self._loaded[source] = self._shared(source) or self.load(source)
        return self._loaded[source]

    def _shared(self, source: WeightSource) -> dict[str, Tensor] | None:
        if self._teacher is None or any(name in self._changed for name in source.names):
            return None
        made_of = {origin for name in source.names for origin in self._origins.get(name, (name,))}
        for other, loaded in self._teacher._loaded.items():
            same = other.target == source.target and made_of == set(other.names)
            if same and all(tensor.shape == self.map.expected[name].shape for name, tensor in loaded.items()):
                return loaded
        return None
