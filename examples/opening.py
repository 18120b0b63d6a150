"""Common start and end of every example: a server, a base model and a table.

`COTRAIN_BASE_URL` and `COTRAIN_API_KEY` name a running server; then an example needs only the
client, and transformers for its tokenizer. Without them the example makes the demo's base model,
serves it, and stops the server at the end. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from demo_server import GIVE_WAY, serving
from how_far import reported
from rich.console import Console
from rich.table import Table

from cotrain import ServiceClient
from cotrain.errors import TokenizerMissing

FOLDER = Path(__file__).parents[1] / ".demo" / "model"
KEY = "tml-example_key-of-mine"

log = Console(stderr=True, highlight=False, soft_wrap=True)

Item = TypeVar("Item")
Cell = str | float
"""Cell of a table; numbers are shown with three digits, and in full as JSON."""


def options_of(about: str | None, steps: int, **own: Cell) -> Namespace:
    """Read the command line; `own` are the options of this example only, with their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"how far to train ({steps})")
    parser.add_argument("--base-model", help="which of the server's base models (its first)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    for name, default in own.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"({default})")
    return parser.parse_args()


@contextmanager
def opened(options: Namespace, *serve_options: str) -> Iterator[tuple[ServiceClient, str]]:
    """Yield a client of the running server, or of one started here, and a base model."""
    with served(*serve_options) as (address, key), ServiceClient(address, key) as service:
        try:
            yield service, options.base_model or base_model_of(service)
        except TokenizerMissing as error:
            sys.exit(str(error))


@contextmanager
def served(*serve_options: str) -> Iterator[tuple[str, str | None]]:
    """Yield the address of a server and a key for it; `serve_options` are for one started here."""
    address = os.environ.get("COTRAIN_BASE_URL")
    if address:
        yield address, None  # the key is in COTRAIN_API_KEY
        return
    with serving(demo_model(), [KEY], *serve_options, say=log.print) as address:
        yield address, KEY


def base_model_of(service: ServiceClient) -> str:
    """Return the first base model of a server."""
    models = service.get_server_capabilities().supported_models
    return next(model.model_name for model in models if model.model_name)


def demo_model(folder: Path = FOLDER) -> Path:
    """Return the demo's base model. Make it if it is missing, which takes half a minute."""
    with reported("Making a base model", log) as report:
        try:
            os.environ.setdefault(*GIVE_WAY)
            from demo_model import cached_model  # requires torch, which the client does not
        except ModuleNotFoundError as error:
            sys.exit(
                f"Serving here needs {error.name}: pip install -c constraints.txt '.[all]'. Or name a "
                "server that runs in COTRAIN_BASE_URL and COTRAIN_API_KEY."
            )
        return cached_model(folder, lambda step, steps, loss: report(step, steps, f"{loss:.2f} nats/token"))


def needed(package: str) -> Any:
    """Import a package that an example needs in addition to the client, or exit with a message."""
    try:
        return import_module(package)
    except ModuleNotFoundError:
        sys.exit(f"{Path(sys.argv[0]).name} needs {package} on this machine: pip install {package}")


def counted(doing: str, items: Iterable[Item], steps: int) -> Iterator[Item]:
    """Yield each item and report the progress, one step per item."""
    with reported(doing, log) as report:
        for step, item in enumerate(items, 1):
            yield item
            report(step, steps, "")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], options: Namespace) -> None:
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
