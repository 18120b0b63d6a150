"""Whether this server can train right now, and if not, why, in sentences for an operator."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from cotrain_store.monitoring.status import pool_status, redis_status, scheduler_alive
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.records import Records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cotrain_server.services import Services
    from cotrain_server.settings import ServerSettings
    from cotrain_store.redis_client.connection import Connection

REDIS_TIMEOUT_S = 1.0
#: Whoever looks at a server whose Redis stands still hears of it in time: Prometheus waits 10 s.
LOOK_TIMEOUT_S = 5.0
#: Written by the supervisor beside the data: what it cannot keep running, process by process.
TROUBLES_FILE = "troubles.json"


async def reasons_not_ready(services: Services) -> list[str]:
    """List what keeps this server from training; empty when nothing does."""
    reasons = ["This process is draining."] if services.draining else []
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            reasons += await _store_reasons(services.connection, services.settings)
    except (TimeoutError, *CONNECTION_LOST):
        reasons.append("Redis does not answer.")
    return reasons + _disk_reasons(services.settings) + read_troubles(services.settings.data_dir)


def read_troubles(data_dir: Path) -> list[str]:
    """Read what the supervisor cannot keep running; empty where none is, or where all is well."""
    try:
        troubles: dict[str, str] = json.loads((data_dir / TROUBLES_FILE).read_text())
    except FileNotFoundError:
        return []
    return [f"{process}: {trouble}" for process, trouble in sorted(troubles.items())]


def write_troubles(data_dir: Path, troubles: dict[str, str]) -> None:
    """Say what cannot be kept running, for `read_troubles` in another process."""
    partial = data_dir / f"{TROUBLES_FILE}.tmp"
    # On a full disk, where Redis dies again and again, its supervisor must not: `/readyz` tells of both.
    with suppress(OSError):
        partial.write_text(json.dumps(troubles))
        partial.replace(data_dir / TROUBLES_FILE)


async def _store_reasons(connection: Connection, settings: ServerSettings) -> list[str]:
    reasons = []
    redis = await redis_status(connection)
    durable = redis.appendonly and redis.appendfsync == "always"
    if not durable and not settings.accept_data_loss:
        reasons.append("Redis could lose acknowledged writes.")
    if not redis.aof_last_write_ok:
        reasons.append("Redis could not write its append-only file.")
    if not await scheduler_alive(connection):
        reasons.append("No scheduler is running.")
    return reasons + await _worker_reasons(connection, settings.base_models)


async def _worker_reasons(connection: Connection, expected: Sequence[str]) -> list[str]:
    pools = await Records(connection).pools()
    served = {p.base_model for p in pools if (await pool_status(connection, p.id)).workers}
    if expected:
        return [f"No worker for {name} is running." for name in expected if name not in served]
    return [] if served else ["No worker is running."]


def _disk_reasons(settings: ServerSettings) -> list[str]:
    free_bytes = shutil.disk_usage(settings.data_dir).free
    return [] if free_bytes > settings.disk_reserve_bytes else ["The disk is almost full."]
