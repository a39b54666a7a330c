"""The command ``kvfold``: the group of all commands, each from its file in ``commands/``."""

from collections.abc import Sequence
from typing import NoReturn

import click

from kvfold.convert.commands.bench_command import bench
from kvfold.convert.commands.chat_command import chat
from kvfold.convert.commands.convert_command import convert
from kvfold.convert.commands.demo_command import demo
from kvfold.convert.commands.drift_command import drift
from kvfold.convert.commands.eval_command import evaluate
from kvfold.convert.commands.inspect_command import inspect
from kvfold.convert.commands.recipes_command import recipes
from kvfold.convert.commands.sweep_command import sweep
from kvfold.convert.commands.uptrain_command import uptrain
from kvfold.convert.commands.verify_command import verify
from kvfold.convert.console import run_command


class _OrderedCommands(click.Group):
    """A click group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands in the order in which they were added."""
        return list(self.commands)


@click.group(
    cls=_OrderedCommands,
    commands=[
        inspect,
        convert,
        sweep,
        drift,
        verify,
        evaluate,
        uptrain,
        bench,
        chat,
        recipes,
        demo,
    ],
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="kvfold", prog_name="kvfold")
@click.pass_context
def kvfold(ctx: click.Context) -> None:
    """Convert trained checkpoints to a far smaller KV cache, and measure what the conversion costs.

    MODEL is a folder or a Hugging Face hub id, optionally with a revision (id@revision).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``arguments`` and exit with status 0 for success, 2 for an invalid
    request or input, 1 for any other error.
    """
    run_command(kvfold, arguments)
