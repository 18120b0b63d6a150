"""Hold tenants and runs back, and let them go on; the scheduler, workers and polls read what is written here."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from cotrain_store.errors import RunClosed
from cotrain_store.keys import run_keys, tenant_keys
from cotrain_store.messages.encoding import decode, encode
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.pauses import Pause, Pauses
from cotrain_store.redis_client.scripts import async_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.runs import RunRecord
    from cotrain_store.redis_client.connection import Connection


class PauseRecords:
    """Write pauses. Each survives every restart, and twice is harmless."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._pause_run = async_script(connection, "run_pause")

    async def pause_tenant(self, tenant: TenantId, reason: str = "") -> None:
        """Take no op and no sample request of a tenant from now on; what is planned or claimed ends as usual."""
        pause = encode(Pause(time.time(), reason))
        await self._redis.hset(tenant_keys.paused_tenants(), tenant, pause)

    async def resume_tenant(self, tenant: TenantId) -> bool:
        """Let a tenant go on; False where it was not paused."""
        return bool(await self._redis.hdel(tenant_keys.paused_tenants(), tenant))

    async def pause_run(self, run: RunRecord, reason: str = "") -> None:
        """Take no op of a run from now on; raises RunClosed for one that has ended."""
        script_keys = [run_keys.log(run.pool, run.id), tenant_keys.paused_runs()]
        pause = encode(Pause(time.time(), reason, run.tenant))
        if await self._pause_run(script_keys, {"run": run.id, "pause": pause}) == b"CLOSED":
            raise RunClosed

    async def resume_run(self, run: RunRecord) -> bool:
        """Let a run go on; False where it was not paused."""
        return bool(await self._redis.hdel(tenant_keys.paused_runs(), run.id))


async def read_pauses(connection: Connection) -> Pauses:
    """Read who is held back."""
    tenants = await connection.hgetall(tenant_keys.paused_tenants())
    runs = await connection.hgetall(tenant_keys.paused_runs())
    return Pauses(
        {TenantId(name): pause for name, pause in _pauses(tenants).items()},
        {RunId(name): pause for name, pause in _pauses(runs).items()},
    )


def _pauses(rows: Mapping[bytes, bytes]) -> dict[str, Pause]:
    return {name.decode(): decode(Pause, json.loads(row)) for name, row in rows.items()}
