"""The terminal: click options built from requests, a command's exit status, and output files named
by options.
"""

import errno
import functools
import gc
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from kvfold.convert.errors import (
    KvfoldError,
    format_option,
    one_line,
    option_error,
    printable,
    system_failure,
)
from kvfold.convert.formatting import jsonable
from kvfold.convert.host import may_have_gpu, set_threads
from kvfold.convert.options import Option, Request, no_gpu, specs
from kvfold.convert.signals import interruptible

# Stands for stdout in place of a file name, as in other command-line tools.
REPORT = "report.html"
STDOUT = "-"
_PLOT_KINDS = (".png", ".svg", ".pdf")


# The options of a request


class PanelCommand(click.Command):
    """A command whose ``--help`` groups options by panel; ``--help`` itself is in the panel
    Running.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (row := each.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(each, "panel", "Running"), []).append(row)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


# Options of the past, and what to use instead of each.
WITHDRAWN: dict[str, str] = {
    "--keep-intervals": "convert with several numbers of --polish, each into an OUT of its own",
    "--keep-quantized": "dequantize the model first, as docs/questions.md shows",
    "--q-rank": "queries keep their size, and the cache does not depend on it; remove the option",
    "--resume": "the same command continues an interrupted run by itself",
    "--spill": "hidden states stay in memory; where they do not fit, lower --samples or --seq-len",
    "--teacher": "kvfold uptrain OUT TRAINED --teacher MODEL2 learns from another model",
    "--train": "kvfold uptrain OUT TRAINED --train all trains all weights",
}

Decorator = Callable[[Any], Any]


def request_options(
    request: type[Request],
    *,
    before: Mapping[str, Sequence[Decorator]] | None = None,
    build: Callable[[dict[str, Any], dict[str, Any]], Request] | None = None,
) -> Decorator:
    """Decorator that adds the fields of ``request`` to a click command as arguments and options.

    The decorated function receives the request built from them. ``before`` maps a field to further
    options, which ``--help`` lists before that field and in its panel. ``build(values, further)``
    creates the request from the values of its fields and of the further options, some of which it
    may remove; with ``build``, no option is required. By default the request is
    ``request(**values)``. A flag that is set by default becomes an option ``--no-NAME``.
    """
    found = specs(request)

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            own = {name: values.pop(name) for name in found}
            # Inverted here, because each version of click declares a flag that sets False in a
            # different way.
            own = {
                name: not value if found[name].default is True else value
                for name, value in own.items()
            }
            made = request(**own) if build is None else build(own, values)
            # Told before a model is downloaded; `device.choose_device` asks torch.
            if getattr(made, "device", None) == "cuda" and not may_have_gpu():
                raise no_gpu()
            function(made, **values)

        decorated: Any = command
        for name, spec in reversed(found.items()):
            required = spec.default is MISSING and (build is None or spec.argument)
            for parameter in (_parameter(spec, required), *reversed((before or {}).get(name, ()))):
                decorated = parameter(decorated)
                if spec.panel is not None:
                    decorated.__click_params__[-1].panel = spec.panel
        return decorated

    return decorate


def json_option(
    help: str = "Also write the numbers to FILE; with -, write only them to stdout.",
) -> Decorator:
    """The option ``--json``, whose value is the parameter ``json_file``."""
    return click.option("--json", "json_file", metavar="FILE|-", help=help)


def report_option(content: str) -> Decorator:
    """The option ``--report``; ``content`` says what is on the page."""
    return click.option(
        "--report",
        metavar="DIR",
        help=f"Also write DIR/report.html, a self-contained page with {content}.",
    )


def _parameter(spec: Option, required: bool) -> Decorator:
    """The click argument or option for one field."""
    if spec.argument:
        if spec.item_type is not None:
            return click.argument(spec.name, metavar=spec.metavar, nargs=-1)
        return click.argument(spec.name, metavar=spec.metavar, required=required)
    metavar = spec.metavar or (f"[{'|'.join(spec.choices)}]" if spec.choices else None)
    # No click.Choice: the request checks words, and its errors suggest similar ones.
    settings: dict[str, Any] = {"help": spec.help, "metavar": metavar}
    settings["shell_complete"] = lambda ctx, param, typed: [
        word for word in spec.choices if word.startswith(typed)
    ]
    names = [format_option(spec.name, spec.default is not True), *spec.aliases, spec.name]
    if bool in spec.types:
        return click.option(*names, is_flag=True, **settings)
    is_number = spec.types and str not in spec.types and not spec.choices
    settings |= {
        "required": required,
        "multiple": spec.multiple,
        "type": spec.types[0] if is_number else str,
    }
    default = spec.default
    if isinstance(default, tuple):
        default = None if spec.multiple else ",".join(map(str, default))
    if default not in (MISSING, None):
        settings |= {"default": default, "show_default": default != ""}
    return click.option(*names, **settings)


# How a command ends

_STYLE = re.compile(r"\x1b\[[\d;]*m")  # colors


class _PlainRecord(logging.LogRecord):
    """What a library logs, without codes that a terminal obeys: names and values from files may
    contain some.
    """

    def getMessage(self) -> str:
        return "\n".join(
            map(printable, _STYLE.sub("", super().getMessage()).expandtabs().splitlines())
        )


def run_command(
    command: click.Command,
    name: str,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Run a click command. An error sets the exit status and prints ``error: ...`` with indented
    details to stderr.

    SIGTERM, which job schedulers and containers send, and SIGHUP end the command as Ctrl-C does.
    The notes of an exception say what an ended run left behind.
    """
    set_threads()
    # libraries' children, such as compilers, must not import a stranger's file of the current folder
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    logging.setLogRecordFactory(_PlainRecord)
    words = sys.argv[1:] if arguments is None else arguments
    left = "nothing was left behind"
    stopped = True
    outcome: tuple[str | None, int] = None, 1
    with suppress(KeyboardInterrupt), interruptible():
        try:
            command.main(args=words, prog_name=name, standalone_mode=False)
            outcome = (None, 0)
            stopped = False
        except (KeyboardInterrupt, click.Abort) as error:
            left = _notes(error) or left
            # A signal may arrive between a context manager's ``yield`` and its block. The manager
            # then cleans up when it is freed, together with the exception; the garbage collection
            # below frees managers in cycles.
        except KvfoldError as error:
            outcome = (str(error), error.exit_status)
            stopped = False
        except click.ClickException as error:
            outcome = (_usage(error, command, name, words), 2)
            stopped = False
        except BrokenPipeError:
            # The interpreter flushes stdout once more at its end, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stopped = False
        except Exception as error:
            if os.environ.get("KVFOLD_TRACEBACK"):
                raise
            advice = "set KVFOLD_TRACEBACK=1 to see the traceback, and please report it"
            text = (
                system_failure(error)
                or f"unexpected {type(error).__name__}: {one_line(error)} ({advice})"
            )
            outcome = (
                printable(text) + "".join(f"; {kept}" for kept in [_notes(error)] if kept),
                1,
            )
            stopped = False
        if stopped:
            gc.collect()
    message, status = (
        (f"interrupted: {left}; run the same command again", 1) if stopped else outcome
    )
    if message is not None:
        # Otherwise the error could appear before output that was printed earlier.
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _notes(error: BaseException) -> str:
    """The notes of an exception, or of the KeyboardInterrupt that click replaced by its own, as a
    clause.
    """
    notes: list[str] = getattr(error, "__notes__", []) or getattr(error.__cause__, "__notes__", [])
    return "; ".join(notes)


def _usage(
    error: click.ClickException, command: click.Command, name: str, arguments: Sequence[str]
) -> str:
    """A sentence about an invalid command line that refers to the ``--help`` of the right command."""
    text = printable(error.format_message().replace("\n", " ").rstrip("."))
    where = name
    # Click's error for an option without its argument names neither the command nor the missing
    # argument.
    called = next(iter(arguments), "")
    if isinstance(command, click.Group) and called in command.commands:
        command = command.commands[called]
        where = f"{name} {called}"
    if isinstance(error, click.UsageError) and error.ctx:
        where = error.ctx.command_path
    if isinstance(error, click.BadOptionUsage) and text.endswith("requires an argument"):
        options = (
            option
            for option in command.params
            if error.option_name in option.opts and option.metavar
        )
        text += "".join(f": {option.metavar}" for option in options)
    if isinstance(error, click.NoSuchOption) and error.option_name in WITHDRAWN:
        text = f"{error.option_name} was withdrawn; {WITHDRAWN[error.option_name]}"
    if "unexpected extra argument" in text:
        text += "; a value with spaces, such as a list of targets, needs quotes"
    # A capital that begins a name in capitals, as REPO, stays.
    text = text if text[1:2].isupper() else f"{text[:1].lower()}{text[1:]}"
    return f"{where}: {text}; see `{where} --help`"


# Files that options name


def check_files(json_file: str | None, plot: str | None = None, report: str | None = None) -> None:
    """Raise InputError if a file for ``--json``, ``--plot`` or ``--report`` cannot be drawn or
    written.

    With ``--json -``, stdout is reserved for the JSON from here on.
    """
    if json_file == STDOUT:
        _reserve_stdout()
    # Checked first, because a long run must not end in an error that could have been found in its
    # first second.
    for option, path in (("plot", plot), ("report", report)):
        if path is not None and find_spec("matplotlib") is None:
            raise option_error(
                option, path, "draws with matplotlib; install it: pip install 'kvfold[report]'"
            )
    if plot is not None and Path(plot).suffix not in _PLOT_KINDS:
        raise option_error(
            "plot", plot, f"must end in {', '.join(_PLOT_KINDS[:-1])} or {_PLOT_KINDS[-1]}"
        )
    if report is not None and (reason := _unwritable(Path(report), folder=True)):
        raise option_error("report", report, f": cannot be written ({reason}); name another folder")
    for option, path in (("json", json_file), ("plot", plot)):
        if path not in (None, STDOUT) and (reason := _unwritable(Path(str(path)))):
            raise option_error(
                option, path, f": cannot be written ({reason}); name a file in an existing folder"
            )


def _reserve_stdout() -> None:
    """Send to stderr what libraries print to stdout past Python, as tokenizers does with its
    warnings.
    """
    usual = sys.__stdout__
    if usual is not None and sys.stdout is usual and usual.fileno() == 1:
        usual.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=usual.encoding, errors=usual.errors)
        os.dup2(2, 1)


def _unwritable(path: Path, folder: bool = False) -> str | None:
    """Why ``path`` cannot be written, or ``report.html`` in that ``folder``, which may not exist
    yet; None if it can.

    Links are refused, because they may lead anywhere, and pipes, because they would block.
    """
    file = path / REPORT if folder else path
    try:
        state = file.lstat() if os.path.lexists(file) else None
        if len(os.fsencode(path.name)) > os.pathconf("/", "PC_NAME_MAX"):
            return os.strerror(errno.ENAMETOOLONG)
    except (OSError, ValueError) as error:
        return one_line(error)
    if folder and path.exists() and not path.is_dir():
        return "it is a file"
    if state is not None and not stat.S_ISREG(state.st_mode):
        return (
            "it is a folder"
            if stat.S_ISDIR(state.st_mode)
            else f"{file.name} is a link or no regular file"
        )
    if not folder and not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    place = next(each for each in (file, *file.parents) if each.exists())
    return None if os.access(place, os.W_OK) else "permission denied"


def tell(json_file: str | None, value: Callable[[], Any], text: str) -> None:
    """Print ``text`` and write ``value()`` as JSON to ``json_file``; if that is stdout, ``text``
    goes to stderr.
    """
    content = (
        "" if json_file is None else json.dumps(jsonable(value()), indent=2, allow_nan=False) + "\n"
    )
    if json_file == STDOUT:
        click.echo(content, nl=False)
    elif json_file is not None:
        try:
            Path(json_file).write_text(content, encoding="utf-8")
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); name another file"
            raise option_error("json", json_file, f": {reason}") from error
    if text:
        click.echo(text, err=json_file == STDOUT)


def append_line(path: Path, line: str) -> None:
    """Append a line to the user's text file. Raises OSError if it is a link, a pipe or another
    special file.
    """
    # A link could point outside the folder, and a pipe would block until somebody reads it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
