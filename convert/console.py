"""How a command ends: exit status 0 done, 2 the request or the input is wrong, 1 anything else; never a traceback."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import click

from kvfold.convert.errors import KvfoldError


def run_command(
    command: click.Command,
    name: str,
    arguments: Sequence[str] | None = None,
    interrupted: str = "nothing was left behind but what --resume goes on from; run the same command again",
) -> NoReturn:
    """Run a click command. What goes wrong becomes the last line on stderr, ``error: ...``, and the exit status.

    SIGTERM, as job schedulers and containers send it, ends the command as Ctrl-C does.
    """
    try:
        with _terminable():
            command.main(args=arguments, prog_name=name, standalone_mode=False)
    except KvfoldError as error:
        _fail(str(error), error.exit_status)
    except click.ClickException as error:
        _fail(_usage(error, name), 2)
    except (KeyboardInterrupt, click.Abort):
        _fail(f"interrupted: {interrupted}", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the interpreter's own flush quiet
        raise SystemExit(1) from None
    except Exception as error:
        if os.environ.get("KVFOLD_TRACEBACK"):
            raise
        text = " ".join(str(error).split())
        _fail(
            f"unexpected {type(error).__name__}: {text} (set KVFOLD_TRACEBACK=1 for the details, and please report it)",
            1,
        )
    raise SystemExit(0)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in the block, once: a second one does not disturb what then cleans up."""

    def interrupt(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    found = signal.getsignal(signal.SIGTERM)
    if found is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)


def _fail(message: str, status: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _usage(error: click.ClickException, name: str) -> str:
    text = error.format_message().replace("\n", " ").rstrip(".")
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else name
    return f"{where}: {text[:1].lower()}{text[1:]}; see `{where} --help`"
