"""Command `cotrain`: the client's commands, and those of installed services.

A distribution provides commands as entry points of the group `cotrain.commands`: a function for one
command, a `typer.Typer` for several. The client imports none of those by name.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer
from rich.markup import escape

from cotrain.commands import admin, checkpoints, data, runs
from cotrain.commands.sample import sample_text
from cotrain.commands.terminal import AsJson, examples, print_result
from cotrain.commands.top import EXAMPLES as TOP_EXAMPLES
from cotrain.commands.top import top
from cotrain.commands.workers import selfcheck
from cotrain.version import __version__

COMMANDS = "cotrain.commands"
INSTALL = "pip install -c constraints.txt '.[all]'"
TAKES_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
PATH = "tinker://1f2e3d4c:train:0/weights/final"


def main() -> None:
    """Run the command line of this process."""
    replace_what_cannot_be_encoded()
    command_line(needed(entry_points(group=COMMANDS), sys.argv[1:]))()


def needed(commands: Iterable[EntryPoint], arguments: Sequence[str]) -> Iterable[EntryPoint]:
    """Return the entry points, or none for a command of the client.

    The import of a server takes as long as that of the client.
    """
    own = typer.Typer()
    _add_own(own)
    names = {each.name or getattr(each.callback, "__name__", "") for each in own.registered_commands}
    names |= {str(each.name) for each in own.registered_groups}
    return () if arguments and arguments[0] in names else commands


def replace_what_cannot_be_encoded() -> None:
    """Configure stdout and stderr to write `?` for characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # not a text stream, or closed
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def command_line(commands: Iterable[EntryPoint]) -> typer.Typer:
    """Return the command line with the client's own commands and those of the entry points."""
    app = typer.Typer(
        name="cotrain",
        help="Train many people's LoRA adapters at once on one frozen base model. "
        "Server and key: COTRAIN_BASE_URL and COTRAIN_API_KEY.",
        epilog=examples(
            "cotrain models",
            "cotrain runs list --json",
            f"cotrain download {PATH} --output adapter/",
            "cotrain sample --model-path tinker://… 'Once upon a time'",
        ),
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
    )
    app.callback()(_options)
    _add_own(app)
    for command in sorted(commands, key=lambda command: command.name):
        _add(app, command)
    return app


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    print_result({"version": __version__}, f"cotrain {__version__}", as_json=as_json)


def _version_alone(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


def _options(
    version_alone: Annotated[
        bool, typer.Option("--version", callback=_version_alone, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parse the options before a command."""


def _add_own(app: typer.Typer) -> None:
    app.command(epilog=examples("cotrain models --json"))(runs.models)
    app.add_typer(runs.app, name="runs")
    app.command(epilog=examples("cotrain why 1f2e3d4c:train:0"))(runs.why)
    app.add_typer(checkpoints.app, name="checkpoints")
    app.add_typer(data.data_app, name="data")
    app.add_typer(admin.app, name="admin")
    app.command(epilog=examples("cotrain selfcheck", "cotrain selfcheck --worker w0 --json"))(selfcheck)
    app.add_typer(runs.webhooks_app, name="webhooks")
    app.command(epilog=examples(f"cotrain download {PATH} --output adapter/"))(checkpoints.download)
    app.command(
        epilog=examples(
            f"cotrain export {PATH} --merged --base Qwen3-0.6B/ -o merged/",
            f"cotrain export {PATH} --vllm -o served/ --check http://127.0.0.1:8001",
            f"cotrain export {PATH} --gguf --leave-out-unembed -o adapter-gguf/",
        )
    )(checkpoints.export)
    app.command(epilog=examples("cotrain upload my-adapter/ --base-model Qwen/Qwen3-0.6B --name mine"))(
        checkpoints.upload
    )
    app.command(
        "sample",
        epilog=examples(
            "cotrain sample 'Once upon a time' --max-tokens 40 --seed 1",
            "cotrain sample --model-path tinker://1f2e3d4c:train:0/sampler_weights/final",
            "cotrain sample --chat 'What is a LoRA?' --temperature 0",
        ),
    )(sample_text)
    app.command(epilog=data.SWEEP_EXAMPLES)(data.sweep)
    app.command(epilog=TOP_EXAMPLES)(top)
    app.command(epilog=examples("cotrain version --json"))(version)


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
        typer.echo(f"{error.name} is not installed: in a checkout, {INSTALL} brings what a server needs", err=True)
        raise typer.Exit(1)

    explain.__doc__ = f"Needs {escape(INSTALL)}: {error.name} is missing."  # help is markup
    return explain
