"""The exceptions of kvfold. The command line turns them into its last line on stderr and its exit status."""

from collections.abc import Sequence

_SHOWN = 20


class KvfoldError(Exception):
    """An error that kvfold explains: what was wrong, where, what was expected, what was found and what to do.

    ``message`` is that sentence. ``details`` are further problems of the same kind, one short line each; the first 20
    are shown, then a count.
    """

    exit_status = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {detail}" for detail in self.details[:_SHOWN])]
        if len(self.details) > _SHOWN:
            lines.append(f"  ... and {len(self.details) - _SHOWN} more")
        return "\n".join(lines)


class InputError(KvfoldError):
    """The request, or the checkpoint or text it names, is wrong: the user can fix it."""

    exit_status = 2


def first_line(error: BaseException) -> str:
    """The first line of a library's error, the name of its type when it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """The whole message of a library's error on one line, the name of its type when it has none."""
    return " ".join(str(error).split()) or type(error).__name__
