"""The terminal: options from requests, exit status of a command, and files that options name.

Exit status: 0 done, 2 the request or the input is wrong, 1 anything else; never a traceback.
"""

import errno
import functools
import gc
import json
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

from kvfold.convert.errors import ALONE, InputError, KvfoldError, as_option, one_line, opt, system_failure, worded
from kvfold.convert.options import Option, Request, specs
from kvfold.convert.signals import interruptible

# Written in place of a file's name, as other command line tools have it.
STDOUT = "-"
_PLOT_KINDS = (".png", ".svg", ".pdf")


# The options of a request


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


Decorator = Callable[[Any], Any]


def request_options(
    request: type[Request],
    *,
    before: Mapping[str, Sequence[Decorator]] | None = None,
    build: Callable[[dict[str, Any], dict[str, Any]], Request] | None = None,
) -> Decorator:
    """Gives a click command the arguments and options of ``request``, and its function the request made of them.

    ``before`` has further options, which ``--help`` lists before one of the request's and in its panel. ``build(values,
    further)`` makes the request of the values of its options, none of which is required then, and of the further ones,
    from which it may take some; by default it is ``request(**values)``. A flag that is set by default has an option
    ``--no-NAME``.
    """
    found = specs(request)

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            own = {name: values.pop(name) for name in found}
            # Click would have to be told of a flag that sets False in another way in each of its versions.
            own = {name: not value if found[name].default is True else value for name, value in own.items()}
            made = request(**own) if build is None else build(own, values)
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


def _parameter(spec: Option, required: bool) -> Decorator:
    """The click argument or option of one field."""
    if spec.argument:
        several: dict[str, Any] = {"nargs": -1} if spec.each is not None else {"required": required}
        return click.argument(spec.name, metavar=spec.metavar, **several)
    metavar = spec.metavar or (f"[{'|'.join(spec.words)}]" if spec.words else None)
    # Words are no click.Choice: the request checks them, and its errors name near ones.
    settings: dict[str, Any] = {"help": spec.help, "metavar": metavar}
    settings["shell_complete"] = lambda ctx, param, typed: [word for word in spec.words if word.startswith(typed)]
    names = [as_option(spec.name, False if spec.default is True else ALONE), *spec.spellings, spec.name]
    if bool in spec.kinds:
        return click.option(*names, is_flag=True, **settings)
    settings |= {"required": required, "multiple": spec.many, "type": str}
    if int in spec.kinds and spec.panel is None and spec.least is not None:
        # A command without panels shows the range of its numbers in --help.
        settings["type"] = click.IntRange(int(spec.least))
    elif spec.kinds and str not in spec.kinds and not spec.words:
        settings["type"] = spec.kinds[0]
    default = ",".join(map(str, spec.default)) if spec.each is not None else spec.default
    if default not in (MISSING, None):
        settings |= {"default": default, "show_default": default != ""}
    return click.option(*names, **settings)


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
        try:
            with worded(as_option):
                command.main(args=words, prog_name=name, standalone_mode=False)
            outcome = None, 0
        except (KeyboardInterrupt, click.Abort):
            # A signal may come between a context manager's ``yield`` and the block below it. The manager then cleans up
            # when it is freed, as its frame is with the exception; what stands in a cycle is freed below.
            pass
        except KvfoldError as error:
            outcome = str(error), error.exit_status
        except click.ClickException as error:
            outcome = _usage(error, command, name, words), 2
        except BrokenPipeError:
            # The interpreter flushes stdout once more at its end, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            outcome = None, 1
        except Exception as error:
            if os.environ.get("KVFOLD_TRACEBACK"):
                raise
            advice = "set KVFOLD_TRACEBACK=1 for the details, and please report it"
            outcome = system_failure(error) or f"unexpected {type(error).__name__}: {one_line(error)} ({advice})", 1
        if outcome is stopped:
            gc.collect()
    message, status = outcome
    if message is not None:
        # Otherwise the error could appear before output that was printed earlier.
        sys.stdout.flush()
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def _usage(error: click.ClickException, command: click.Command, name: str, arguments: Sequence[str]) -> str:
    """A wrong command line in one sentence that names the command whose ``--help`` has the rules."""
    text, where = error.format_message().replace("\n", " ").rstrip("."), name
    # Click says of an option without its argument neither to which command it belongs nor what is missing.
    called = next(iter(arguments), "")
    if isinstance(command, click.Group) and called in command.commands:
        command, where = command.commands[called], f"{name} {called}"
    if isinstance(error, click.UsageError) and error.ctx:
        where = error.ctx.command_path
    if isinstance(error, click.BadOptionUsage) and text.endswith("requires an argument"):
        options = (option for option in command.params if error.option_name in option.opts and option.metavar)
        text += "".join(f": {option.metavar}" for option in options)
    return f"{where}: {text[:1].lower()}{text[1:]}; see `{where} --help`"


def duration(seconds: float) -> str:
    """Seconds as text: "7 s", "12 min"."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"


# Files that options name


def check_files(json_file: str | None, plot: str | None = None, report: str | None = None) -> None:
    """Raise InputError for a file of ``--json``, ``--plot`` or ``--report`` that cannot be drawn or written."""
    # A long run must not end in an error that its first second could have told.
    for option, path in (("plot", plot), ("report", report)):
        if path is not None and find_spec("matplotlib") is None:
            raise InputError(f"{opt(option, path)} draws with matplotlib; install it: pip install 'kvfold[report]'")
    if plot is not None and Path(plot).suffix not in _PLOT_KINDS:
        raise InputError(f"{opt('plot', plot)} must end in {', '.join(_PLOT_KINDS)}")
    if report is not None and Path(report).exists() and not Path(report).is_dir():
        raise InputError(f"{opt('report', report)} is a file; name a folder")
    for option, path in (("json", json_file), ("plot", plot)):
        if path is None or path == STDOUT:
            continue
        file, reason = Path(path), None
        if file.is_dir():
            reason = "it is a folder"
        elif not file.parent.is_dir():
            reason = f"there is no folder {file.parent}"
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "permission denied"
        if reason is not None:
            raise InputError(f"{opt(option, path)}: cannot be written ({reason}); name a file in a folder that exists")


def tell(json_file: str | None, value: Callable[[], Any], text: str) -> None:
    """Print ``text``; where ``json_file`` is given write ``value`` there, and where that is stdout nothing else."""
    content = "" if json_file is None else json.dumps(value(), indent=2) + "\n"
    if json_file == STDOUT:
        click.echo(content, nl=False)
    elif json_file is not None:
        try:
            Path(json_file).write_text(content, encoding="utf-8")
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); name another file"
            raise InputError(f"{opt('json', json_file)}: {reason}") from error
    if text:
        click.echo(text, err=json_file == STDOUT)


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
