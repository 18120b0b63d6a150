"""`cotrain keys`: make, list and revoke API keys, in the Redis of a running server."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.table import Table

from cotrain.commands.terminal import AsJson, examples, minute, print_result, table, valid_until
from cotrain_server.commands.options import DEFAULT_DATA_DIR, DataDir, ServersRedisUrl, fail
from cotrain_server.supervisor.data_folder import UnsafeFolder, found_socket
from cotrain_store.errors import KeyInSettings
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import CONNECTION_LOST, open_connection
from cotrain_store.tenants.api_keys import KeyRecord, Tenants

T = TypeVar("T")

#: Otherwise an unresponsive Redis would block the command without a message.
TIMEOUT_S = 10.0

keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)


@keys.command(
    epilog=examples("cotrain keys create ada", "cotrain keys create ci --tenant t-3f9c2a71 --role viewer --days 30")
)
def create(
    name: Annotated[str, typer.Argument(help="Whose key this is.")],
    tenant: Annotated[
        str | None, typer.Option(help="One more key of this tenant (its id); by default a new tenant.")
    ] = None,
    new_tenant: Annotated[
        bool, typer.Option("--new-tenant", help="--tenant is the id of a tenant to be made.")
    ] = False,
    role: Annotated[Literal["member", "viewer"], typer.Option(help="A viewer can only read.")] = "member",
    days: Annotated[float | None, typer.Option(help="Stop accepting it after so long.")] = None,
    prefix: Annotated[
        Literal["tml", "sk"], typer.Option(help="How it starts: the tinker SDK takes tml-…, the mint SDK also sk-….")
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
    key = _with_tenants(
        lambda tenants: tenants.issue(name, tenant=owner, role=role, not_after=not_after, prefix=prefix),
        data_dir,
        redis_url,
    )
    print_result({"name": name, "key": key}, key, as_json=as_json)


@keys.command("list", epilog=examples("cotrain keys list --json | jq -r '.[].name'"))
def list_keys(data_dir: DataDir = DEFAULT_DATA_DIR, redis_url: ServersRedisUrl = None, as_json: AsJson = False) -> None:
    """List the API keys, without their secrets: those made here, and those of the server's settings."""
    found = _with_tenants(Tenants.list_keys, data_dir, redis_url)
    print_result([_as_json(key) for key in found], _table(found), as_json=as_json)


@keys.command(epilog=examples("cotrain keys revoke 3f9c2a71"))
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `cotrain keys list` shows it.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    redis_url: ServersRedisUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop accepting an API key; within five seconds everywhere.

    A key in the server's settings must be removed there.
    """
    try:
        is_revoked = _with_tenants(lambda tenants: tenants.revoke(key_id), data_dir, redis_url)
    except KeyInSettings as error:
        fail(str(error))
    if not is_revoked:
        fail(f"There is no key {key_id}.")
    print_result({"id": key_id, "revoked": True}, as_json=as_json)


def _ask_before_a_new_tenant(tenant: TenantId, data_dir: Path, redis_url: str | None) -> None:
    """Ask before a key is made for an unknown tenant, whose id may be misspelt."""
    if _with_tenants(lambda tenants: tenants.is_known(tenant), data_dir, redis_url):
        return
    if not sys.stdin.isatty():
        fail(
            f"There is no tenant {tenant}: `cotrain keys list` shows the ids of those there are. "
            "With --new-tenant it is made."
        )
    typer.confirm(f"There is no tenant {tenant}. Make it?", abort=True, err=True)


def _table(records: list[KeyRecord]) -> Table:
    rows = (
        (
            *(record.id, f"{record.prefix}…", record.tenant, record.name, record.role, _source(record)),
            minute(record.created_at),
            valid_until(record.not_after),
        )
        for record in records
    )
    return table(("id", "key", "tenant", "name", "role", "from", "since", "valid until"), rows)


def _source(record: KeyRecord) -> str:
    return "settings" if record.in_settings else "keys create"


def _with_tenants(work: Callable[[Tenants], Awaitable[T]], data_dir: Path, redis_url: str | None) -> T:
    """Return the result of `work` with the tenants of a running server. Exit if its Redis does not answer."""
    folder = data_dir.absolute()

    async def run() -> T:
        connection = open_connection(redis_url or f"unix://{found_socket(folder)}")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await work(Tenants(connection))
        finally:
            await connection.aclose()

    try:
        return asyncio.run(run())
    except UnsafeFolder as error:
        fail(str(error))
    except (TimeoutError, *CONNECTION_LOST):
        fail(
            "The server's Redis does not answer. Is it the one of --redis-url?"
            if redis_url
            else f"The server's Redis does not answer. Is `cotrain serve` running on {data_dir}? "
            "--data-dir (COTRAIN_DATA_DIR) names its folder."
        )


def _as_json(record: KeyRecord) -> dict[str, str | float | None]:
    """Return a key in the format of `cotrain keys list --json` in every version. Times are seconds since 1970."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "name": record.name,
        "role": record.role,
        "prefix": record.prefix,
        "source": _source(record),
        "created_at": record.created_at,
        "not_after": record.not_after,
    }
