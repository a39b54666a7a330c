"""The protocol of conversion methods: a method makes the layers of one plan, one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.progress import Stages

if TYPE_CHECKING:
    from torch import Tensor

Notes = Mapping[str, Any]  # JSON values


@dataclass(frozen=True)
class Converted:
    """A converted layer: its tensors, named and shaped as in the output's files, and notes for ``kvfold.json``."""

    index: int
    tensors: Mapping[str, "Tensor"]
    notes: Notes


class Measured(ABC):
    """The measurements of a calibrated method."""

    @abstractmethod
    def record(self, folder: Path) -> dict[str, Any]:
        """Entries of ``kvfold.json``. Raises KvfoldError when the checkpoint in ``folder`` is not the one measured."""


class Method(ABC):
    """A method at work on one plan::

        with SomeMethod.begin(plan, scratch, stages) as method:
            method.walk_again(journal, stages)
            for layer in method.layers(journal):
                ...                                 # write layer.tensors, note layer.notes
            measured = method.measured(journal.notes)

    ``plan`` is the request's, with everything resolved that it left open (the split of a budget, MLA's frequencies).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        """Resolve ``plan``. Temporary files go into ``scratch``, the output's folder, and are gone when the block ends.

        Raises InputError when the model cannot be calibrated.
        """
        yield cls(plan)

    def walk_again(self, journal: Journal, stages: Stages) -> None:  # noqa: B027  # most have nothing to walk
        """Before `layers`: take the text past the layers that ``journal`` has finished, where the method reads any."""

    @abstractmethod
    def layers(self, journal: Journal) -> Iterator[Converted]:
        """The layers in order, without those that ``journal`` has finished; of methods that read no text, ``pending``.

        InputError for non-finite weights.
        """

    def measured(self, notes: Sequence[Notes]) -> Measured | None:
        """After the last layer: what was measured, None for methods that read no text. ``notes`` are of all layers."""
        return None
