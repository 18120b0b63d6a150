"""Options that `serve` and `keys` share, and how either ends when it cannot go on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from cotrain_server.supervisor.environment import opened

DEFAULT_DATA_DIR = Path.home() / ".cotrain"

DataDir = Annotated[
    Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where everything durable is kept.")
]


def _opened(redis_url: str | None) -> str | None:
    try:
        return opened(redis_url)
    except ValueError as mistake:
        refuse(str(mistake))


RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="COTRAIN_REDIS_URL",
        callback=_opened,
        help="Use this Redis; by default one is started.",
    ),
]
ServersRedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="COTRAIN_REDIS_URL",
        callback=_opened,
        help="The server's Redis; by default the one in its folder.",
    ),
]


def fail(message: str) -> NoReturn:
    """Say what is wrong and exit with status 1."""
    _say_why(message)
    sys.exit(1)


def refuse(message: str) -> NoReturn:
    """Say what is wrong with the command and exit with EX_USAGE."""
    _say_why(message)
    sys.exit(os.EX_USAGE)


def _say_why(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(message))
