"""The terminal: options from requests, exit status of a command, and files that options name.

Exit status: 0 done, 2 the request or the input is wrong, 1 anything else; never a traceback.
"""

import errno
import functools
import gc
import os
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
    InputError,
    KvfoldError,
    as_option,
    did_you_mean,
    one_line,
    opt,
    system_failure,
    worded,
)
from kvfold.convert.options import Request, Spec, specs
from kvfold.convert.signals import interruptible

# Written in place of a file's name, as other command line tools have it.
STDOUT = "-"
_PLOT_KINDS = (".png", ".svg", ".pdf")


# The options of a request


class PanelOption(click.Option):
    """An option that ``--help`` lists under the heading ``panel``."""

    def __init__(self, *args: Any, panel: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.panel = panel


class PanelCommand(click.Command):
    """A command whose ``--help`` lists options by their panels; ``--help`` itself is under Running."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and (row := each.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(each, "panel", "Running"), []).append(row)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class WordChoice(click.Choice[str]):
    """One of some words; an error names the one that was probably meant."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + did_you_mean(value, list(self.choices))


Decorator = Callable[[Any], Any]


def request_options(
    request: type[Request],
    *,
    before: Mapping[str, Sequence[Decorator]] | None = None,
    build: Callable[[dict[str, Any], dict[str, Any]], Request] | None = None,
    optional: Sequence[str] = (),
) -> Decorator:
    """Gives a click command the arguments and options of ``request``, and its function the request made of them.

    ``before`` has further options that ``--help`` lists before one of the request's. ``build(values, further)`` makes
    the request of the values of its options and of the further ones, from which it may take some; by default it is
    ``request(**values)``. ``optional`` names options without a default that ``build`` may supply. A flag that is set by
    default has an option ``--no-NAME``.
    """
    found = specs(request)
    names = {_parameter_name(spec): name for name, spec in found.items()}

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            own = {names[name]: _value(found[names[name]], values.pop(name)) for name in names}
            made = request(**own) if build is None else build(own, values)
            function(made, **values)

        decorated: Any = command
        for name, spec in reversed(found.items()):
            decorated = parameter(spec, required=spec.required and name not in optional)(decorated)
            for extra in reversed((before or {}).get(name, ())):
                decorated = extra(decorated)
        return decorated

    return decorate


def _parameter_name(spec: Spec) -> str:
    return f"no_{spec.name}" if spec.default is True else spec.name


def _value(spec: Spec, value: Any) -> Any:
    return not value if spec.default is True else value


def parameter(spec: Spec, required: bool) -> Decorator:
    """The click argument or option of one field."""
    details = spec.details
    if details.argument:
        several: dict[str, Any] = {"nargs": -1} if spec.each is not None else {"required": required}
        return click.argument(spec.name, metavar=details.metavar, **several)
    flag = as_option(spec.name, False) if spec.default is True else as_option(spec.name)
    names = [flag, *details.spellings, _parameter_name(spec)]
    settings: dict[str, Any] = {"help": details.help, "metavar": details.metavar}
    if details.panel is not None:
        settings |= {"cls": PanelOption, "panel": details.panel}
    if bool in spec.kinds:
        return click.option(*names, is_flag=True, **settings)
    settings |= {"required": required, "multiple": spec.many, "type": _click_type(spec)}
    if spec.each is not None:
        default = ",".join(map(str, spec.default))
        settings |= {"default": default, "show_default": bool(default)}
    elif spec.default not in (MISSING, None):
        settings |= {"default": spec.default, "show_default": True}
    return click.option(*names, **settings)


def _click_type(spec: Spec) -> Any:
    if spec.words and spec.kinds:
        return steps_or_auto
    if spec.words and spec.details.metavar is None:
        return WordChoice(spec.words)
    if str in spec.kinds or not spec.kinds:  # also names or numbers with commas between them
        return str
    # A command without panels shows the range of its numbers in --help.
    if int in spec.kinds and spec.details.panel is None and spec.details.least is not None:
        return click.IntRange(int(spec.details.least))
    return spec.kinds[0]


def steps_or_auto(value: int | str) -> int | str:
    """The type of an option that takes a number of steps or a word; the request refuses other words."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else value


# How a command ends


def run_command(
    command: click.Command,
    name: str,
    arguments: Sequence[str] | None = None,
    interrupted: str = "nothing was left behind but what --resume continues from; run the same command again",
) -> NoReturn:
    """Run a click command. An error becomes the exit status and the end of stderr: a line ``error: ...``, its details
    indented below.

    SIGTERM, as job schedulers and containers send it, and SIGHUP end the command as Ctrl-C does.
    """
    words = sys.argv[1:] if arguments is None else arguments
    stopped = (f"interrupted: {interrupted}", 1)
    outcome: tuple[str | None, int] = stopped
    with suppress(KeyboardInterrupt), interruptible():
        outcome = _outcome(command, name, words, stopped)
        if outcome is stopped:
            # A signal may come between a context manager's ``yield`` and the block below it. The manager then cleans up
            # when it is freed, as its frame is with the exception; what stands in a cycle is freed here.
            gc.collect()
    message, status = outcome
    if message is not None:
        # Otherwise the error could appear before output that was printed earlier.
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _outcome(
    command: click.Command, name: str, words: Sequence[str], stopped: tuple[str, int]
) -> tuple[str | None, int]:
    """Run a command. Returns its error message, None if there is nothing to say, and its exit status."""
    try:
        with worded(as_option):
            command.main(args=words, prog_name=name, standalone_mode=False)
    except KvfoldError as error:
        return str(error), error.exit_status
    except click.ClickException as error:
        return _usage(error, command, name, words), 2
    except (KeyboardInterrupt, click.Abort):
        return stopped
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None, 1
    except Exception as error:
        if os.environ.get("KVFOLD_TRACEBACK"):
            raise
        if (reason := system_failure(error)) is not None:
            return reason, 1
        advice = "set KVFOLD_TRACEBACK=1 for the details, and please report it"
        return f"unexpected {type(error).__name__}: {one_line(error)} ({advice})", 1
    return None, 0


def _usage(error: click.ClickException, command: click.Command, name: str, arguments: Sequence[str]) -> str:
    text, where = error.format_message().replace("\n", " ").rstrip("."), name
    called = next(iter(arguments), "")
    if isinstance(command, click.Group) and called in command.commands:
        command, where = command.commands[called], f"{name} {called}"
    if isinstance(error, click.UsageError) and error.ctx:
        where = error.ctx.command_path
    # Click does not say which argument is missing.
    if isinstance(error, click.BadOptionUsage) and text.endswith("requires an argument"):
        options = (option for option in command.params if error.option_name in option.opts and option.metavar)
        text += "".join(f": {option.metavar}" for option in options)
    return f"{where}: {text[:1].lower()}{text[1:]}; see `{where} --help`"


def duration(seconds: float) -> str:
    """Seconds as text: "7 s", "12 min"."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"


# Files of measurements and plots: refused before a long run rather than after it


def check_writable(path: str, option: str = "json") -> None:
    """Raise InputError when ``path`` (`STDOUT` never) cannot be written; ``option`` is the one that named it."""
    file = Path(path)
    if path == STDOUT:
        return
    # A long run must not end in an error that its first second could have told.
    if file.is_dir():
        raise _unwritable(path, option, "it is a folder")
    if not file.parent.is_dir():
        raise _unwritable(path, option, f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _unwritable(path, option, "permission denied")


def check_matplotlib(option: str, value: str) -> None:
    """Raise InputError if matplotlib, with which ``option`` draws, is not installed."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{opt(option, value)} draws with matplotlib; install it: pip install 'kvfold[report]'")


def check_plot(path: str) -> None:
    """Raise InputError if ``--plot path`` cannot be drawn: no matplotlib, an unknown kind of file, not writable."""
    check_matplotlib("plot", path)
    if Path(path).suffix not in _PLOT_KINDS:
        raise InputError(f"{opt('plot', path)} must end in {', '.join(_PLOT_KINDS)}")
    check_writable(path, "plot")


def write_text(path: str, text: str, option: str = "json") -> None:
    """Write ``text``, to the terminal where ``path`` is `STDOUT`. Raises InputError when that fails."""
    if path == STDOUT:
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, option, error.strerror) from error


def _unwritable(path: str, option: str, reason: str | None) -> InputError:
    return InputError(f"{opt(option, path)}: cannot be written ({reason}); name a file in a folder that exists")


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file of the user. OSError when it is a link, a pipe or another special file."""
    # A link could lead out of the folder, and a pipe would block until somebody reads it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
