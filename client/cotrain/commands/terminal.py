"""Shared parts of all commands: open a client, print tables or JSON, and report errors in one sentence.

Also calls outside the training protocol: the server's status, its endpoints for text, and its admin API. They need no
session, no thread and no retries, and the status needs no key.
"""

import json
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer
from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cotrain.clients.service import ServiceClient
from cotrain.errors import APIConnectionError, CotrainError, MalformedMessage, NotFoundError
from cotrain.settings import ClientSettings, checked_url, proxy_of, through_proxy, trusted
from cotrain.transport.progress import PROGRESS
from cotrain.transport.responses import RetryPolicy, connection_error, is_page, parsed, refusal

AdminKey = Annotated[str, typer.Option(envvar="COTRAIN_ADMIN_KEY", help="The operator's key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: docs/reference/cli.md names its fields.")]
BaseUrl = Annotated[str, typer.Option(envvar="COTRAIN_BASE_URL")]
DataDir = Annotated[Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Data folder of a server on this host.")]
PathOf = Annotated[str, typer.Argument(metavar="PATH", help="tinker://<run>/<kind>/<name>")]

#: A person waits, so report soon that there is no server. A server that responds may take its time.
PATIENCE = RetryPolicy(give_up_unanswered_after_s=5.0, longest_delay_s=2.0)
#: Ids and paths are meant to be copied, so no cell is ever cut or wrapped; a terminal wraps lines.
WIDTH = 10_000
#: Help is markup, where the colons of a run's id would produce an emoji; empty bold markup separates them.
NO_TRAIN = ":train[bold][/bold]:"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Not printable, but part of texts: the two joiners separate or combine letters and emoji.
_TEXT_TOO = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def examples(*lines: str) -> str:
    """Return examples for the end of a command's help."""
    return "\n\n".join(("Examples:", *lines)).replace(":train:", NO_TRAIN)


@contextmanager
def opened() -> Iterator[ServiceClient]:
    """Open a client with the server and key of the environment."""
    with failing_in_a_sentence(), ServiceClient(policy=PATIENCE) as service:
        yield service


@contextmanager
def failing_in_a_sentence() -> Iterator[None]:
    """Report errors on stderr in one sentence and exit with status 1."""
    try:
        yield
    except (CotrainError, OSError, ValueError) as error:
        typer.echo(harmless(" ".join(str(error).split())), err=True)
        raise typer.Exit(1) from error


def print_json(value: Any) -> None:
    """Print a value as JSON, converted by pydantic; characters that are no text stay escaped."""
    text = json.dumps(to_jsonable_python(value), indent=2, ensure_ascii=False)
    typer.echo("".join(c if _is_text(c) else json.dumps(c)[1:-1] for c in text))


def harmless(text: str) -> str:
    """Replace characters that are no text: names, errors and samples may contain terminal control codes."""
    return "".join(c if _is_text(c) else REPLACEMENT for c in text)


def _is_text(character: str) -> bool:
    return (
        character.isprintable()
        or character in _TEXT_TOO
        or unicodedata.category(character) == "Zs"  # spaces of other widths
    )


@dataclass(frozen=True)
class Harmless:
    """Renderable without control characters in its texts, so that foreign names cannot control the terminal."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the content."""
        for text, style, control in console.render(self.content, options):
            yield Segment(text if control else harmless(text), style, control)


def print_rich(content: RenderableType) -> None:
    """Print a table, in colour if the output is a terminal."""
    # A run's id contains `:train:`, which rich renders as an emoji, and names may look like markup.
    Console(width=WIDTH, markup=False, emoji=False, highlight=False).print(Harmless(content))


def print_result(value: Any, *shown: RenderableType, as_json: bool, hint: str = "") -> None:
    """Print a result: the value as JSON if `as_json`, otherwise the parts for a person, and a hint on stderr."""
    if as_json:
        print_json(value)
        return
    for part in shown:
        print_rich(part)
    if hint:
        typer.echo(hint, err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table. None becomes an empty cell, a time its minute in UTC, and numbers are written by `str`."""
    made = Table(*columns, box=None)
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def facts(*rows: tuple[str, object]) -> Table:
    """Return names and values, one pair in each line."""
    made = table(("", ""), rows)
    made.show_header = False
    return made


def _cell(value: object) -> Text | str:
    if isinstance(value, datetime):
        return minute(value)
    return value if isinstance(value, Text) else "" if value is None else str(value)


@contextmanager
def stages(*columns: ProgressColumn, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of stages on stderr, one bar each, if that is a terminal."""
    console = Console(stderr=True, markup=False, emoji=False)
    tasks: dict[str, TaskID] = {}
    bars = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
    with PROGRESS.hidden(), bars as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield report


@contextmanager
def transfer(name: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a transfer as one stage."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with stages(*columns, shown=shown) as report:
        yield partial(report, name)


def minute(when: datetime | float) -> str:
    """Return a time (or a Unix timestamp) in UTC, to the minute."""
    at = when if isinstance(when, datetime) else datetime.fromtimestamp(when, UTC)
    return f"{at:%Y-%m-%d %H:%M}"


def valid_until(not_after: float | None) -> str | None:
    """Return the expiry of a key, marked if it has passed; None for a key without one."""
    if not_after is None:
        return None
    return minute(not_after) + (", expired" if not_after < time.time() else "")


# A sample may wait for minutes on a busy server.
TIMEOUT = httpx.Timeout(10.0, read=600.0)
_ADMIN_KEY_FILE = "admin-key"
#: Default data folder of `cotrain serve`.
DEFAULT_DATA_DIR = Path.home() / ".cotrain"
#: The admin key of this host is sent to no other host.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextmanager
def plain_http(settings: ClientSettings) -> Iterator[httpx.Client]:
    """Open an HTTP client, without a key if there is none. Raises APIConnectionError from within the block."""
    headers = {"X-API-Key": settings.api_key} if settings.api_key else {}
    try:
        with httpx.Client(
            base_url=settings.base_url,
            headers=headers,
            timeout=TIMEOUT,
            verify=trusted(),
            proxy=proxy_of(settings.base_url),
            trust_env=False,
        ) as client:
            yield client
    except httpx.TransportError as error:
        through = through_proxy(settings.base_url)
        raise connection_error(error, httpx.URL(settings.base_url), through) from error
    except httpx.InvalidURL as error:
        raise APIConnectionError(f"cannot reach {settings.base_url}: {error}") from error


def checked(response: httpx.Response) -> httpx.Response:
    """Return a successful response of the server.

    Raises APIStatusError for a rejection, and ForeignAnswer for a redirect or a web page.
    """
    if response.is_success and not is_page(response):
        return response
    response.read()
    if response.is_error:
        raise refusal(response)
    return parsed(response, _foreign)


def _foreign(response: httpx.Response) -> httpx.Response:
    raise MalformedMessage(f"{response.url} did not answer as a cotrain server does")


@dataclass(frozen=True)
class AdminOptions:
    """Options of `cotrain admin` before its subcommand."""

    base_url: str
    admin_key: str
    data_dir: Path


def ask_admin(
    context: typer.Context,
    method: str,
    *path: str,
    json: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    below: str = "admin/",
) -> Any:
    """Request a path of the admin API, and return the JSON of the response, or None if it is empty.

    The server is that of `context.obj`, and the path is `below` /api/v1/. An error ends the command with one sentence.
    """
    server: AdminOptions = context.obj
    with failing_in_a_sentence():
        url = checked_url(server.base_url)
        key = server.admin_key or stored_admin_key(url, server.data_dir)
        if not key:
            raise ValueError(NO_ADMIN_KEY)
        where = "/".join(quote(part, safe="") for part in path)
        query = {name: value for name, value in (params or {}).items() if value is not None}
        with plain_http(ClientSettings(url, key)) as http:
            answer = http.request(method, f"/api/v1/{below}{where}", json=json, params=query)
        try:
            checked(answer)
        except NotFoundError as error:
            code = answer.json().get("code")
            if code in ("operators_only", "not_found"):
                raise ValueError(
                    f"{url} does not take this admin key. On the server's host it is in the file admin-key of the data "
                    "folder, unless COTRAIN_ADMIN_KEY is set there."
                ) from error
            if code in _IDS_ARE_IN:
                raise ValueError(f"{error} `{_IDS_ARE_IN[code]}` shows the ids.") from error
            raise
        return answer.json() if answer.content else None


NO_ADMIN_KEY = "The admin key is needed: COTRAIN_ADMIN_KEY, or on the server's host its data folder (--data-dir)."
#: Command that lists the ids, by the code of an unknown one.
_IDS_ARE_IN = {
    "tenant_not_found": "cotrain admin tenants list",
    "worker_not_found": "cotrain admin workers list",
}


def stored_admin_key(url: str, data_dir: Path) -> str:
    """Return the operator's key of a server on this host; "" if it is unreadable or the server is remote."""
    if urlsplit(url).hostname not in _LOOPBACK:
        return ""
    try:
        return (data_dir / _ADMIN_KEY_FILE).read_text().strip()
    except OSError:
        return ""
