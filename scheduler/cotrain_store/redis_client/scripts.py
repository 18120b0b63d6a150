"""Our Lua scripts as calls: the keys in order, one JSON object, and what a script stores unread.

A script reads the object's fields by name (`args`), so that one more renumbers nothing. Numbers in it are
exact up to 2**53; what must stay as it is to the byte (bodies, results, steps) follows the object.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redis.exceptions import ResponseError

from cotrain_store.redis_client.refusals import named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _typeshed import DataclassInstance

    from cotrain_store.redis_client.connection import Connection, SyncConnection

    Args: TypeAlias = DataclassInstance | Mapping[str, Any]

SCRIPTS = Path(__file__).parent.parent / "scripts"
#: The parts in `scripts/lib` that a script or part calls, each of which has its own.
_NEEDS = re.compile(r"^-- needs: (.+)$", re.MULTILINE)


class AsyncScript(Protocol):
    """One script on an asynchronous connection."""

    async def __call__(self, keys: Sequence[str], args: Args, /, *stored: bytes | str) -> Any:
        """Run it; `stored` follows the JSON object as it is."""


class SyncScript(Protocol):
    """One script on a synchronous connection."""

    def __call__(self, keys: Sequence[str], args: Args, /, *stored: bytes | str) -> Any:
        """Run it; `stored` follows the JSON object as it is."""


def async_script(connection: Connection, name: str) -> AsyncScript:
    """Load one of our scripts, after the parts it needs, for an asynchronous connection."""
    script = connection.register_script(source(name))

    async def run(keys: Sequence[str], args: Args, *stored: bytes | str) -> Any:
        try:
            return await script(keys, [encode_args(args), *stored])
        except ResponseError as refused:
            raise named(refused) from None

    return run


def sync_script(connection: SyncConnection, name: str) -> SyncScript:
    """Load one of our scripts, after the parts it needs, for a synchronous connection."""
    script = connection.register_script(source(name))

    def run(keys: Sequence[str], args: Args, *stored: bytes | str) -> Any:
        try:
            return script(keys, [encode_args(args), *stored])
        except ResponseError as refused:
            raise named(refused) from None

    return run


def encode_args(args: Args) -> bytes:
    """Write what a script decodes. A dataclass leaves out its fields that are None: Lua reads nil there.

    A mapping must hold no None: it would come as `cjson.null`, which Lua takes for true.

    Half a surrogate pair, which a tenant's text may hold, is no Unicode: Redis could not read it.
    """
    text = json.dumps(args, default=_fields, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


@cache
def source(name: str) -> str:
    """Read a script, after the parts it needs, each once."""
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
