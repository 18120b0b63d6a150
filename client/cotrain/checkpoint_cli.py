"""`cotrain checkpoint …`: bring, list, download and delete checkpoints from a shell."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from cotrain.errors import CotrainError
from cotrain.service import ServiceClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cotrain.rest_types import Checkpoint

app = typer.Typer(
    help="Bring, list, download and delete checkpoints. Server and key: COTRAIN_BASE_URL and "
    "COTRAIN_API_KEY.",
    no_args_is_help=True,
)
console = Console()
#: Characters of a list beside its paths.
OTHER_COLUMNS = 60

PathOf = Annotated[str, typer.Argument(help="tinker://<run>/<kind>/<name>")]


@app.command()
def upload(
    source: Annotated[
        Path, typer.Argument(help="A PEFT folder, or a tar or zip of one.", exists=True)
    ],
    base_model: Annotated[str, typer.Option(help="The base model it was trained on.")],
    name: Annotated[str, typer.Option(help="What to call the checkpoint.")],
    ttl_seconds: Annotated[
        int | None, typer.Option(help="Delete it after so long; by default never.")
    ] = None,
) -> None:
    """Bring a LoRA adapter that was made elsewhere: safetensors, as PEFT saves it."""
    with _client() as service, _bar(source.name) as progress:
        path = service.upload_checkpoint(
            source, base_model, name, ttl_seconds=ttl_seconds, progress=progress
        )
    typer.echo(path)


@app.command(name="list")
def list_checkpoints() -> None:
    """List your checkpoints, newest first."""
    with _client() as service:
        checkpoints = service.list_checkpoints()
    longest = max((len(each.tinker_path) for each in checkpoints), default=0)
    # Paths are there to be copied: whole, however narrow the terminal is.
    Console(width=max(console.width, longest + OTHER_COLUMNS)).print(_table(checkpoints))


@app.command()
def download(
    path: PathOf,
    output: Annotated[Path, typer.Option(help="The folder to write its files to.")] = Path(),
) -> None:
    """Fetch a checkpoint's adapter: a folder that plain PEFT, vLLM and merge tools read."""
    with _client() as service, _bar(path.rpartition("/")[2]) as progress:
        service.download_checkpoint(path, output, progress)


@app.command()
def delete(
    paths: Annotated[list[str], typer.Argument(help="tinker://<run>/<kind>/<name>")],
) -> None:
    """Delete checkpoints. What was loaded from them stays."""
    with _client() as service:
        for path in paths:
            service.delete_checkpoint(path)


@contextmanager
def _client() -> Iterator[ServiceClient]:
    """Open a client; what goes wrong is said in one line."""
    try:
        with ServiceClient() as service:
            yield service
    except (CotrainError, OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far a transfer is."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _table(checkpoints: list[Checkpoint]) -> Table:
    table = Table("path", "size", "saved", "expires", box=None)
    for each in checkpoints:
        table.add_row(
            each.tinker_path,
            "" if each.size_bytes is None else decimal(each.size_bytes),
            f"{each.time:%Y-%m-%d %H:%M}",
            f"{each.expires_at:%Y-%m-%d %H:%M}" if each.expires_at else "never",
        )
    return table
