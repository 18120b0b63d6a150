"""What every example opens and ends with: a server, a base model on it, and a table.

`COTRAIN_BASE_URL` and `COTRAIN_API_KEY` name a server that runs already. Without them the example makes
the demo's base model, serves it, and stops the server when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from demo_model import cached_model
from demo_server import serving
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cotrain import ServiceClient

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

FOLDER = Path(__file__).parents[1] / ".demo" / "model"
KEY = "tml-example_key-of-mine"

Cell = str | float
"""What stands in a table; numbers are shown with three digits, and in full as JSON."""


def options_of(about: str | None, steps: int, **own: Cell) -> Namespace:
    """Read the command line; `own` are options that only this example has, and their defaults."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"how far to train ({steps})")
    parser.add_argument("--base-model", help="which of the server's base models (its first)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    for name, default in own.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"({default})")
    return parser.parse_args()


@contextmanager
def opened(options: Namespace, *serve_options: str) -> Iterator[tuple[ServiceClient, str]]:
    """Give a client of the server that runs, or of one that is started here, and a base model."""
    with served(*serve_options) as (address, key), ServiceClient(address, key) as service:
        yield service, options.base_model or base_model_of(service)


@contextmanager
def served(*serve_options: str) -> Iterator[tuple[str, str | None]]:
    """Give the address of a server and a key for it; `serve_options` are for one started here."""
    address = os.environ.get("COTRAIN_BASE_URL")
    if address:
        yield address, None  # the key is in COTRAIN_API_KEY
        return
    with serving(demo_model(), [KEY], *serve_options) as address:
        yield address, KEY


def base_model_of(service: ServiceClient) -> str:
    """Name the first base model of a server."""
    models = service.get_server_capabilities().supported_models
    return next(model.model_name for model in models if model.model_name)


def demo_model(folder: Path = FOLDER) -> Path:
    """Make the demo's base model, a minute's work, or take the one made before."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Making a base model", total=None)
        return cached_model(
            folder, lambda step, steps, _: bar.update(task, completed=step, total=steps)
        )


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], options: Namespace
) -> None:
    """Print a table; with `--json`, a list of objects with every digit."""
    if options.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    table = Table(title=title)
    for column, cell in zip(columns, rows[0], strict=True):
        table.add_column(column, justify="left" if isinstance(cell, str) else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
