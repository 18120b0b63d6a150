"""`cotrain top`: pools, cycles, queues and tenants, live."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path  # noqa: TC003  # typer reads it at run time
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live

from cotrain.commands.http import DEFAULT_DATA_DIR, checked, kept_admin_key, plain_http
from cotrain.commands.terminal import (
    AsJson,
    Harmless,
    examples,
    failing_in_a_sentence,
    harmless,
    print_json,
    print_rich,
)
from cotrain.commands.top_view import view
from cotrain.errors import InternalServerError
from cotrain.settings import DEFAULT_BASE_URL, ClientSettings, checked_url
from cotrain.transport.responses import reader, understood
from cotrain.wire.status import ServerStatus

EXAMPLES = examples(
    "cotrain top", "COTRAIN_ADMIN_KEY=… cotrain top", "cotrain top --once --json | jq .pools"
)


TIMEOUT_S = 10.0


def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, for scripts.")] = False,
    all_tenants: Annotated[
        bool,
        typer.Option(
            "--all", help="As the operator on the server's host: its data folder has the key."
        ),
    ] = False,
    base_url: Annotated[str, typer.Option(envvar="COTRAIN_BASE_URL")] = DEFAULT_BASE_URL,
    admin_key: Annotated[
        str, typer.Option(envvar="COTRAIN_ADMIN_KEY", help="The operator's key: all tenants.")
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="COTRAIN_API_KEY", help="Without the operator's: your own part.")
    ] = "",
    data_dir: Annotated[
        Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where a server on this host keeps it.")
    ] = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Watch pools, cycles, queues and tenants; Ctrl-C ends it. With --json: look once."""
    with failing_in_a_sentence():
        url = checked_url(base_url)
        key = admin_key or ("" if all_tenants else api_key) or kept_admin_key(url, data_dir)
        _show(ClientSettings(url, key), every, as_json=as_json, once=once)


def _show(settings: ClientSettings, every: float, *, as_json: bool, once: bool) -> None:
    with plain_http(settings) as http:
        if as_json:
            print_json(_ask(http))
        elif once or not sys.stdout.isatty():
            print_rich(view(_ask(http)))
        else:
            _watch(http, every)


def _watch(http: httpx.Client, every_s: float) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    first = Harmless(view(_ask(http)))
    with (
        suppress(KeyboardInterrupt),
        Live(first, console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.refresh()
            time.sleep(every_s)
            try:
                live.update(Harmless(view(_ask(http))))
            except (httpx.TransportError, InternalServerError) as error:
                live.update(
                    harmless(f"{http.base_url} does not answer: {error}")
                )  # it may be starting again


def _ask(http: httpx.Client) -> ServerStatus:
    """Ask how the server is. Raises APIError, or MalformedMessage where it does not say."""
    answer = checked(http.get("/status", timeout=TIMEOUT_S))
    return understood(answer, reader(ServerStatus))
