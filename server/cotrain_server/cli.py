"""`cotrain serve` and `cotrain keys`: thin commands over the supervisor and the store."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cotrain.commands.terminal import AsJson, examples, print_json, print_rich
from cotrain_server.settings import split_words
from cotrain_server.supervisor.commands import Plan
from cotrain_server.supervisor.data_folder import FolderInUse, UnsafeFolder, found_socket
from cotrain_server.supervisor.environment import opened, unknown_variables
from cotrain_server.supervisor.given_keys import all_keys, out_of_sight
from cotrain_server.supervisor.supervisor import Announcement, CannotServe, Supervisor
from cotrain_store.errors import InvalidKey, KeyInSettings, UnsafeRedis
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import CONNECTION_LOST, open_connection
from cotrain_store.redis_client.embedded_server import NoRedisFound
from cotrain_store.tenants.api_keys import Tenants

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cotrain_store.tenants.key_format import KeyRecord

DEFAULT_DATA_DIR = Path.home() / ".cotrain"

DataDir = Annotated[
    Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where everything durable is kept.")
]


def _opened(redis_url: str | None) -> str | None:
    try:
        return opened(redis_url)
    except ValueError as mistake:
        _give_up(str(mistake))


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

#: A Redis that stands still is not waited for: nobody would know what `cotrain keys` waits for.
KEYS_TIMEOUT_S = 10.0

keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)
console = Console(highlight=False, soft_wrap=True)


def serve(
    base_model: Annotated[
        list[str] | None,
        typer.Option(
            envvar=["COTRAIN_BASE_MODELS", "COTRAIN_BASE_MODEL"],
            help="Needed: hub id, folder, or NAME=FOLDER. Repeat it for several base models.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(envvar="COTRAIN_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="COTRAIN_PORT", help="0: a free one.")] = 8000,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="COTRAIN_API_KEYS",
            help="Accept this key (tml-… or sk-…, or NAME=KEY); repeat it for several tenants. By default "
            "one is made.",
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            envvar="COTRAIN_API_KEYS_FILE",
            help="Accept the keys in this file, too; -: standard input.",
        ),
    ] = None,
    clock_mode: Annotated[
        Literal["eager", "metronome"],
        typer.Option(
            envvar="COTRAIN_CLOCK_MODE", help="When a cycle starts: at once, or on a beat."
        ),
    ] = "eager",
    clock_period_s: Annotated[
        float, typer.Option(envvar="COTRAIN_CLOCK_PERIOD_S", help="Longest cycle, or the beat.")
    ] = 10.0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(envvar="COTRAIN_DEVICE")
    ] = "auto",
    torch_threads: Annotated[
        int, typer.Option(envvar="COTRAIN_TORCH_THREADS", help="CPU threads per worker; 0: all.")
    ] = 0,
    redis_url: RedisUrl = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option(envvar="COTRAIN_ACCEPT_DATA_LOSS", help="Take a Redis that may lose writes."),
    ] = False,
    log_level: Annotated[str, typer.Option(envvar="COTRAIN_LOG_LEVEL")] = "info",
) -> None:
    """Serve base models on this host: Redis, API, scheduler and workers in one command.

    Every option is also a COTRAIN_* variable, and so is every other setting of these processes.

    Examples:

    cotrain serve --base-model Qwen/Qwen3-0.6B

    cotrain serve --base-model my-model=/models/mine --host 0.0.0.0 --clock-mode metronome
    """
    misspelt = unknown_variables()
    if misspelt:
        _give_up(f"Unknown settings: {', '.join(misspelt)}.")
    if not base_model:
        _give_up(
            "Which base model? `cotrain serve --base-model Qwen/Qwen3-0.6B`, a folder instead of "
            "that name, or COTRAIN_BASE_MODEL."
        )
    keys_given = split_words(",".join(api_key or ()))
    out_of_sight(keys_given)
    try:
        api_keys = all_keys(keys_given, api_keys_file)
    except (InvalidKey, OSError) as error:
        _give_up(f"--api-key: {error}")
    given = {
        "CLOCK_MODE": clock_mode,
        "CLOCK_PERIOD_S": str(clock_period_s),
        "DEVICE": device,
        "TORCH_THREADS": str(torch_threads),
        "LOG_LEVEL": log_level,
    }
    plan = Plan(
        base_models=tuple(_base_model(name) for names in base_model for name in names.split(",")),
        host=host,
        port=port,
        data_dir=data_dir.absolute(),
        redis_url=redis_url,
        api_keys=api_keys,
        accept_data_loss=accept_data_loss,
        given=given,
    )
    _run(plan)


@keys.command(epilog=examples("cotrain keys create ada", "cotrain keys create ci --days 30"))
def create(
    name: Annotated[str, typer.Argument(help="Whose key this is.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="One more key of this tenant (its id); by default a new tenant."),
    ] = None,
    new_tenant: Annotated[
        bool, typer.Option("--new-tenant", help="--tenant is the id of a tenant to be made.")
    ] = False,
    days: Annotated[float | None, typer.Option(help="Stop accepting it after so long.")] = None,
    prefix: Annotated[
        Literal["tml", "sk"],
        typer.Option(help="How it starts: the tinker SDK takes tml-…, the mint SDK also sk-…."),
    ] = "tml",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    redis_url: ServersRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key and print it; it is shown only now."""
    not_after = None if days is None else (datetime.now(UTC) + timedelta(days=days)).timestamp()
    owner = None if tenant is None else TenantId(tenant)
    if owner is not None and not new_tenant:
        _ask_before_a_new_tenant(owner, data_dir, redis_url)

    async def issue(tenants: Tenants) -> None:
        key = await tenants.issue(name, tenant=owner, not_after=not_after, prefix=prefix)
        if as_json:
            print_json({"name": name, "key": key})
        else:
            typer.echo(key)

    _with_tenants(issue, data_dir, redis_url)


@keys.command("list", epilog=examples("cotrain keys list --json | jq -r '.[].name'"))
def list_keys(
    data_dir: DataDir = DEFAULT_DATA_DIR, redis_url: ServersRedisUrl = None, as_json: AsJson = False
) -> None:
    """List the API keys, without their secrets: those made here, and those of the server's settings."""

    async def show(tenants: Tenants) -> None:
        found = await tenants.list_keys()
        if as_json:
            print_json([_as_json(key) for key in found])
        else:
            print_rich(_table(found))

    _with_tenants(show, data_dir, redis_url)


@keys.command(epilog=examples("cotrain keys revoke 3f9c2a71"))
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `cotrain keys list` shows it.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    redis_url: ServersRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop accepting an API key; within five seconds everywhere.

    One that stands in the server's settings is taken back there.
    """

    async def remove(tenants: Tenants) -> None:
        try:
            if not await tenants.revoke(key_id):
                _fail(f"There is no key {key_id}.")
        except KeyInSettings as error:
            _fail(str(error))
        if as_json:
            print_json({"id": key_id, "revoked": True})

    _with_tenants(remove, data_dir, redis_url)


def _ask_before_a_new_tenant(tenant: TenantId, data_dir: Path, redis_url: str | None) -> None:
    """A key of a misspelt tenant would see nothing of what that tenant has."""
    known: list[bool] = []

    async def look(tenants: Tenants) -> None:
        known.append(await tenants.is_known(tenant))

    _with_tenants(look, data_dir, redis_url)
    if known == [True]:
        return
    if not sys.stdin.isatty():
        _fail(
            f"There is no tenant {tenant}: `cotrain keys list` shows the ids of those there are. "
            "With --new-tenant it is made."
        )
    typer.confirm(f"There is no tenant {tenant}. Make it?", abort=True, err=True)


def _run(plan: Plan) -> None:
    try:
        asyncio.run(Supervisor(plan, _say, _announce).run())
    except (FolderInUse, UnsafeFolder, NoRedisFound, UnsafeRedis, CannotServe) as error:
        _give_up(str(error))
    except OSError as error:
        _give_up(f"Cannot listen on {plan.host}:{plan.port}: {error.strerror}.")


def _base_model(name: str) -> str:
    """Make a folder's path absolute: the workers and the clients are started elsewhere."""
    alias, _, source = name.rpartition("=")
    if not Path(source).is_dir():
        if source.startswith((".", "/", "~")):
            _give_up(f"There is no folder {source}.")
        return name
    folder = str(Path(source).resolve())
    return f"{alias}={folder}" if alias else folder


def _say(line: str) -> None:
    console.print(f"[dim]{datetime.now():%H:%M:%S}[/dim] {escape(line)}")  # for a terminal


def _announce(announcement: Announcement) -> None:
    if announcement.new_key:
        console.print(f"API key, shown only now: [bold]{announcement.new_key}[/bold]")
    console.print(f"[bold green]cotrain ready at {announcement.address}[/bold green]")


def _table(records: list[KeyRecord]) -> Table:
    table = Table("id", "key", "tenant", "name", "from", "since", "valid until", box=None)
    for record in records:
        until = "" if record.not_after is None else _date(record.not_after)
        table.add_row(
            record.id, f"{record.prefix}…", record.tenant, record.name, _source(record),
            _date(record.created_at), until,
        )  # fmt: skip
    return table


def _source(record: KeyRecord) -> str:
    return "settings" if record.in_settings else "keys create"


def _date(timestamp: float) -> str:
    return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M}"


def _with_tenants(
    work: Callable[[Tenants], Awaitable[None]], data_dir: Path, redis_url: str | None
) -> None:
    folder = data_dir.absolute()

    async def run() -> None:
        url = redis_url or f"unix://{found_socket(folder)}"
        connection = open_connection(url)
        try:
            async with asyncio.timeout(KEYS_TIMEOUT_S):
                await work(Tenants(connection))
        finally:
            await connection.aclose()

    try:
        asyncio.run(run())
    except UnsafeFolder as error:
        _fail(str(error))
    except (TimeoutError, *CONNECTION_LOST):
        _fail(
            "The server's Redis does not answer. Is it the one of --redis-url?"
            if redis_url
            else f"The server's Redis does not answer. Is `cotrain serve` running on {data_dir}? "
            "--data-dir (COTRAIN_DATA_DIR) names its folder."
        )


def _as_json(record: KeyRecord) -> dict[str, str | float | None]:
    """Write a key as every version of `cotrain keys list --json` does; times are seconds since 1970."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "name": record.name,
        "prefix": record.prefix,
        "source": _source(record),
        "created_at": record.created_at,
        "not_after": record.not_after,
    }


def _fail(message: str) -> NoReturn:
    _say_why(message)
    sys.exit(1)


def _give_up(message: str) -> NoReturn:
    _say_why(message)
    sys.exit(os.EX_USAGE)


def _say_why(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(message))
