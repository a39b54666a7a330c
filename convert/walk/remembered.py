"""A teacher's layer that remembers: several students compare their attention with what its attention gave."""

from dataclasses import dataclass, field

from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.attention.drift.streams import LayerOutput

Memory = dict[int, tuple[Tensor, LayerOutput]]  # by the identity of the input, which lives as long


@dataclass(frozen=True)
class Remembered(OpenLayer):
    """An open layer whose attention runs once for each input tensor; only what it gave is kept, no queries or keys."""

    memory: Memory = field(default_factory=dict)

    @classmethod
    def of(cls, layer: OpenLayer) -> "Remembered":
        return cls(layer.index, layer.module, layer.arguments, layer.tensors)

    def __call__(self, hidden: Tensor) -> LayerOutput:
        output = super().__call__(hidden)
        self._keep(hidden, output)
        return output

    def attend(self, hidden: Tensor) -> LayerOutput:
        """As that of an open layer, but for queries, keys and heads, which are None."""
        if id(hidden) not in self.memory:
            self._keep(hidden, super().attend(hidden))
        return self.memory[id(hidden)][1]

    def _keep(self, hidden: Tensor, output: LayerOutput) -> None:
        attention = output.attention
        self.memory[id(hidden)] = hidden, LayerOutput(None, attention, attention.new_empty(0))
