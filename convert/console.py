"""The terminal: click options built from requests, a command's exit status, and output files named
by options.
"""

import errno
import functools
import gc
import json
import logging
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click
from tqdm.utils import ObjectWrapper

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import (
    InputError,
    KvfoldError,
    escape_text,
    explain_system_error,
    format_option,
    option_error,
    summarize_error,
)
from kvfold.convert.formatting import to_json_values
from kvfold.convert.options import Option, Request, collect_options
from kvfold.convert.progress import ProgressStages
from kvfold.convert.signals import interrupt_on_signals

REPORT = "report.html"
STDOUT = "-"  # stands for stdout in place of a file name, as in other command-line tools
Decorator = Callable[[Any], Any]
# What a terminal obeys or cannot show: controls, marks of writing direction, halves of surrogates
_CODES = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_CODES |= {*range(0xD800, 0xE000)}
_CONTROLS = {code: repr(chr(code))[1:-1] for code in _CODES - {*map(ord, "\t\n")}}


def add_request_options(
    request: type[Request],
    build: Callable[[dict[str, Any], dict[str, Any]], Request] | None = None,
) -> Decorator:
    """A decorator that adds the fields of ``request`` to a click command as arguments and options.

    The decorated function receives the request built from them: ``request(**values)``, or
    ``build(values, further)``, which may remove some of the ``further`` options of the function.
    The files of its options ``--json`` and ``--report`` are checked before.
    """
    options = collect_options(request)

    def decorate_function(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def call_with_request(**values: Any) -> None:
            own = {name: values.pop(name) for name in options}
            built = request(**own) if build is None else build(own, values)
            check_output_files(values.get("json_file"), values.get("report"))
            if getattr(built, "device", None) == "cuda":  # before a model is downloaded
                from kvfold.convert.device import choose_device

                choose_device("cuda")
            function(built, **values)

        decorated: Any = call_with_request
        for spec in reversed(options.values()):
            decorated = _make_click_parameter(spec)(decorated)
        return decorated

    return decorate_function


def _make_click_parameter(spec: Option) -> Decorator:
    """The click argument or option for one field of a request, which checks its value later. A flag
    that is set by default gets the form ``--no-NAME``.
    """
    if spec.argument:
        count = -1 if spec.is_tuple else 1
        required = spec.default is MISSING
        return click.argument(spec.name, metavar=spec.metavar, nargs=count, required=required)
    is_flag = bool in spec.types
    spelling = format_option(spec.name)
    if spec.default is True:
        spelling += f"/{format_option(spec.name, False)}"
    default = None if spec.default is MISSING else spec.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default)) or None
    metavar = f"[{'|'.join(spec.choices)}]" if spec.choices else "N"
    return click.option(
        spelling,
        spec.name,
        help=spec.help,
        metavar=spec.metavar or metavar,
        multiple=spec.multiple,
        is_flag=is_flag,
        default=default,
        show_default=not is_flag,
        type=None if is_flag else str,
    )


json_option: Decorator = click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    help="Also write the result to FILE; with -, write only it to stdout.",
)
report_option: Decorator = click.option(
    "--report",
    metavar="DIR",
    help="Also write DIR/report.html, a self-contained page with tables and charts.",
)


class _EscapedStream(ObjectWrapper):
    """A text stream that writes the control codes in texts as Python escapes. Names and values from
    files may contain some; a terminal would obey them.
    """

    def write(self, text: str) -> int:
        """Write ``text``; codes at its beginning by which progress bars move the cursor stay."""
        body = text.lstrip("\r\n\x1b[A")
        self._wrapped.write(text[: len(text) - len(body)] + body.translate(_CONTROLS))
        return len(text)


class _EscapedLogRecord(logging.LogRecord):
    """A log record of a library whose message has no control codes for the terminal; names and
    values from files may contain some.
    """

    def getMessage(self) -> str:
        """The message with control characters escaped."""
        colorless = re.sub(r"\x1b\[[\d;]*m", "", super().getMessage())
        return "\n".join(map(escape_text, colorless.expandtabs().splitlines()))


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a click command and exit; after an error, print ``error: ...`` with indented details to
    stderr.

    SIGTERM, which job schedulers and containers send, and SIGHUP end the command as Ctrl-C does.
    The notes of an exception say what an ended run left behind.
    """
    # By default OpenMP's threads spin while they wait for one another, and burn the time of other
    # processes. Set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    # Children of libraries, such as compilers, must not import a stranger's file of the current
    # folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    logging.setLogRecordFactory(_EscapedLogRecord)
    with (
        redirect_stdout(_EscapedStream(sys.stdout or open(os.devnull, "w"))),
        redirect_stderr(_EscapedStream(sys.stderr or open(os.devnull, "w"))),
    ):
        status = _run_and_print_error(command, arguments)
    raise SystemExit(status)


def _run_and_print_error(command: click.Command, arguments: Sequence[str] | None) -> int:
    """Run a click command, print the error that it ends in, and return the exit status."""
    left_behind = "nothing was left behind"
    message: str | None = None  # None: interrupted
    status = 1
    with suppress(KeyboardInterrupt), interrupt_on_signals():
        try:
            # A standard stream that is closed must not become the number of an output file, into
            # which libraries would then print.
            while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
                pass
            os.close(descriptor)
            command.main(args=arguments, prog_name=command.name, standalone_mode=False)
            status = 0
        except (KeyboardInterrupt, click.Abort) as error:
            # click puts an Abort in the place of a KeyboardInterrupt, which has the notes.
            notes = getattr(error.__cause__ or error, "__notes__", [left_behind])
            left_behind = "; ".join(notes)
        except Exception as error:
            message, status = _explain_error(error)
        if status:
            # A signal may arrive between a context manager's ``yield`` and its block. The manager
            # then cleans up when it is freed, together with the exception; managers in cycles are
            # freed here.
            gc.collect()
    if status and message is None:
        message = f"interrupted: {left_behind}; run the same command again"
    if message:
        # Otherwise the error could appear before output that was printed earlier.
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr)
    return status


def _explain_error(error: Exception) -> tuple[str, int]:
    """The lines to print about an error, none for a closed pipe, and the exit status."""
    if isinstance(error, KvfoldError):
        return str(error), error.exit_status
    if isinstance(error, click.UsageError):
        name = error.ctx.command_path if error.ctx else "kvfold"
        text = " ".join(error.format_message().split()).rstrip(".")
        word = getattr(error, "option_name", text.removeprefix("No such command ").strip("'"))
        withdrawn = json.loads((Path(__file__).parent / "data" / "withdrawn.json").read_text())
        if word in withdrawn:
            text = f"{word} was withdrawn; {withdrawn[word]}"
        return escape_text(f"{name}: {text}; see `{name} --help`"), 2
    if isinstance(error, BrokenPipeError):
        # The interpreter flushes stdout once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "", 1
    if os.environ.get("KVFOLD_TRACEBACK"):
        raise error
    message = explain_system_error(error) or (
        f"unexpected {type(error).__name__}: {summarize_error(error)} (set KVFOLD_TRACEBACK=1 to"
        " see the traceback, and please report it)"
    )
    status = 2 if getattr(error, "errno", None) == errno.ENAMETOOLONG else 1
    return escape_text("; ".join([message, *getattr(error, "__notes__", ())])), status


def check_output_files(json_file: str | None, report: str | None = None) -> None:
    """Raise InputError if the file of ``--json`` or ``--report`` cannot be written, or matplotlib
    is missing, so that a long run does not fail at its end.

    With ``--json -``, stdout is reserved for the JSON from here on.
    """
    if json_file == STDOUT:
        _reserve_stdout()
    elif json_file is not None:
        _check_writable("json", Path(json_file))
    if report is not None:
        if find_spec("matplotlib") is None:
            raise option_error(
                "report",
                report,
                "needs matplotlib, which is not installed; run pip install 'kvfold[report]'",
            )
        _check_writable("report", Path(report) / REPORT)


def _reserve_stdout() -> None:
    """Redirect to stderr what libraries write to the stdout file descriptor, such as warnings of
    tokenizers.
    """
    stdout = sys.__stdout__
    if stdout is not None and stdout is getattr(sys.stdout, "_wrapped", sys.stdout):
        stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)


def _check_writable(option: str, file: Path) -> None:
    """Raise InputError if ``file`` cannot be written. Missing folders are no obstacle: they are
    created when the file is written.

    Links are refused, because they may lead anywhere, and pipes, because they would block.
    """
    obstacle = None
    existing = file
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            obstacle = "it is a folder, a link or no regular file"
    except FileNotFoundError:
        existing = next(path for path in file.parents if path.exists())
    except (OSError, ValueError) as error:
        obstacle = summarize_error(error)
    if obstacle is None and not os.access(existing, os.W_OK):
        obstacle = f"{existing} is not writable"
    if obstacle is not None:
        raise option_error(option, file, f": cannot be written ({obstacle}); name another path")


def check_models_and_load_torch(*models: str | None, quiet: bool) -> None:
    """Raise InputError unless `open_checkpoint` can open each of ``models``; None is left out. Then
    import torch and transformers, so that a command that has called this shows wrong paths before
    the seconds that they take. Unless ``quiet``, stderr shows both.
    """
    names = [model for model in models if model is not None]
    if not quiet:
        print(f"reading {escape_text(' and '.join(names))}", file=sys.stderr)
    for name in names:
        open_checkpoint(name)
    with ProgressStages(quiet=quiet)("loading torch"):
        import kvfold.convert.stream.stock  # noqa: F401


def require_finite_predictions(model: str, figures: Iterable[float]) -> None:
    """Raise InputError unless all ``figures``, computed from the predictions of ``model``, are
    finite.
    """
    if not all(map(math.isfinite, figures)):
        raise InputError(
            f"{model}: its predictions are NaN or infinite; download or convert it again (`kvfold"
            " verify` finds damaged tensors of a result)"
        )


def print_result(json_file: str | None, value: Callable[[], Any], text: str) -> None:
    """Print ``text``, and write the JSON of ``value()`` to ``json_file``, if given; if that is
    stdout, ``text`` goes to stderr.
    """
    if json_file is not None:
        content = json.dumps(to_json_values(value()), indent=2)
        if json_file == STDOUT:
            click.echo(content)
        else:
            Path(json_file).parent.mkdir(parents=True, exist_ok=True)
            Path(json_file).write_text(f"{content}\n", encoding="utf-8")
    if text:
        click.echo(text, err=json_file == STDOUT)
