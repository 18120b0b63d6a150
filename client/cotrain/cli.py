"""The `cotrain` command. Its subcommands live beside the services they start.

A distribution offers them as entry points of the group `cotrain.commands`: a function for one
command, a `typer.Typer` for several. The client imports none of them by name.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

import typer

from cotrain.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

COMMANDS = "cotrain.commands"
TAKES_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    """Run the command line of this process."""
    command_line(entry_points(group=COMMANDS))()


def command_line(commands: Iterable[EntryPoint]) -> typer.Typer:
    """Build the command line of these commands and `version`."""
    app = typer.Typer(
        name="cotrain",
        help="Train many people's LoRA adapters at once on one frozen base model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.command()(version)
    for command in sorted(commands, key=lambda command: command.name):
        _add(app, command)
    return app


def version() -> None:
    """Print the version."""
    typer.echo(f"cotrain {__version__}")


def _add(app: typer.Typer, command: EntryPoint) -> None:
    try:
        loaded = command.load()
    except ModuleNotFoundError as error:
        app.command(command.name, context_settings=TAKES_ANYTHING)(_explain(command, error))
        return
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=command.name)
    else:
        app.command(command.name)(loaded)


def _explain(command: EntryPoint, error: ModuleNotFoundError) -> Callable[[], None]:
    def explain() -> None:
        typer.echo(f"this command needs: pip install 'cotrain[all]' (no {error.name})", err=True)
        raise typer.Exit(1)

    explain.__doc__ = f"Needs cotrain[all], of which {error.name} is missing."
    return explain
