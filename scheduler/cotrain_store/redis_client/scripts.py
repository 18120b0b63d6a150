"""Loader of the Lua scripts as callables: one JSON object, and values stored verbatim.

A script reads the object's fields by name (`args`), and makes its keys of them. Numbers in it are exact up to
2**53. Values that must stay byte-identical (bodies, results, steps) follow the object.

A script checks the epoch of its caller before it writes (`lib/fence.lua`). It returns FENCED for an older epoch, and
the call raises `Fenced`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redis.exceptions import ResponseError

from cotrain_store import redis_keys
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.redis_client.clients import named
from cotrain_store.redis_client.connection import Connection, SyncConnection

if TYPE_CHECKING:  # of typeshed, which exists only for type checkers
    from _typeshed import DataclassInstance

    Args: TypeAlias = DataclassInstance | Mapping[str, Any]

SCRIPTS = Path(__file__).parent.parent / "scripts"
#: Names of the parts in `scripts/lib` that a script or part requires; parts may require further parts.
_NEEDS = re.compile(r"^-- needs: (.+)$", re.MULTILINE)


class AsyncScript(Protocol):
    """One script on an asynchronous connection."""

    async def __call__(self, args: Args, /, *stored: bytes | str) -> Any:
        """Run the script; `stored` follows the JSON object unchanged."""


class SyncScript(Protocol):
    """One script on a synchronous connection."""

    def __call__(self, args: Args, /, *stored: bytes | str) -> Any:
        """Run the script; `stored` follows the JSON object unchanged."""


def async_script(connection: Connection, name: str) -> AsyncScript:
    """Return a script, preceded by the parts it needs, for an asynchronous connection."""
    script = connection.register_script(source(name))

    async def run(args: Args, *stored: bytes | str) -> Any:
        try:
            return _unfenced(await script(args=[encode_args(args), *stored]))
        except ResponseError as refused:
            raise named(refused) from None

    return run


def sync_script(connection: SyncConnection, name: str) -> SyncScript:
    """Return a script, preceded by the parts it needs, for a synchronous connection."""
    script = connection.register_script(source(name))

    def run(args: Args, *stored: bytes | str) -> Any:
        try:
            return _unfenced(script(args=[encode_args(args), *stored]))
        except ResponseError as refused:
            raise named(refused) from None

    return run


def worker_args(pool: PoolId, worker: WorkerId, epoch: int) -> dict[str, Any]:
    """Return the arguments of a script that only the newest process of a worker may run."""
    fence = redis_keys.worker_epoch(pool, worker)
    return {"fence": fence, "epoch": str(epoch), "prefix": redis_keys.prefix(pool), "worker": worker}


def _unfenced(answer: Any) -> Any:
    if answer == b"FENCED":
        raise Fenced
    return answer


def encode_args(args: Args) -> bytes:
    """Return the JSON of a script's arguments. Fields of a dataclass that are None are omitted: Lua reads nil.

    A mapping must contain no None, which would become `cjson.null`, a true value in Lua. Half a surrogate pair in a
    tenant's text is replaced: it is not valid Unicode, and Redis could not read it.
    """
    return _ENCODER.encode(args).encode("utf-8", "replace")


@cache
def source(name: str) -> str:
    """Return the source of a script, preceded by each part it needs, once."""
    parts: dict[Path, str] = {}
    _collect(SCRIPTS / f"{name}.lua", parts)
    return "\n".join(parts.values())


def _collect(path: Path, parts: dict[Path, str]) -> None:
    text = path.read_text()
    needs = _NEEDS.search(text)
    for part in needs[1].split(", ") if needs else ():
        if (needed := SCRIPTS / "lib" / f"{part}.lua") not in parts:
            _collect(needed, parts)
    parts[path] = text


def _fields(record: DataclassInstance) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if value is not None}


_ENCODER = json.JSONEncoder(default=_fields, separators=(",", ":"), ensure_ascii=False)
