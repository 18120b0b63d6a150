"""Policies for tenants and runs: limits, fair-queueing weights and pauses, and the bytes that runs hold.

The operator sets them; the scheduler, workers and polls read them. The bytes of a run are known before it is made, and
counted until its last file is deleted.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.errors import RunClosed
from cotrain_store.messages.fleet import WEIGHT, Pause, Pauses, PlanPolicy
from cotrain_store.messages.ids import RunId, TenantId, decode, encode
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

#: Bytes for each trained value: weight, gradient and both moments of Adam, 4 bytes each.
BYTES_PER_VALUE = 4 * 4
#: Recovery copies on disk: the newest one and its predecessor.
RECOVERY_COPIES = 2
#: Copies counted for a run: the recovery copies, and the run in a worker's memory, on or off the device.
STATES_KEPT = RECOVERY_COPIES + 1
#: Minimum of the default quota of a tenant, in bytes.
LEAST_QUOTA = 200_000_000_000
#: Number of runs that the default quota allows at the largest rank on the largest base model served.
LARGEST_RUNS = 8


@dataclass(frozen=True)
class RunWeight:
    """Size of a run and its limits; all in bytes."""

    bytes: int  # all bytes counted for the run
    disk_bytes: int  # bytes of its recovery copies
    quota: int  # limit of all runs of its tenant
    free_bytes: int  # free bytes of the disk, above the reserve


class Policies:
    """Reads and writes limits and weights. The caller of a setter has checked the values."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._tenant_limits = async_script(connection, "tenant_limits")

    async def limits(self, tenant: TenantId) -> dict[str, int]:
        """Return a tenant's own limits by the names of quotas."""
        row = await self._redis.hgetall(redis_keys.limits(tenant))
        return {name.decode(): int(number) for name, number in row.items()}

    async def set_limits(self, tenant: TenantId, given: Mapping[str, int | None]) -> None:
        """Set the given limits atomically; None restores the default."""
        numbers = {quota: str(number) for quota, number in given.items() if number is not None}
        back = sorted(given.keys() - numbers.keys())
        await self._tenant_limits({"tenant": tenant, "numbers": numbers, "back": back})

    async def weight(self, tenant: TenantId) -> float:
        """Return a tenant's weight."""
        return float(await self._redis.hget(redis_keys.tenant_weights(), tenant) or WEIGHT)

    async def set_weight(self, tenant: TenantId, weight: float) -> None:
        """Set a tenant's weight. The default weight deletes the record."""
        if weight == WEIGHT:
            await self._redis.hdel(redis_keys.tenant_weights(), tenant)
        else:
            await self._redis.hset(redis_keys.tenant_weights(), tenant, repr(weight))


async def read_policy(connection: Connection) -> PlanPolicy:
    """Return the pauses, and the weights of all tenants whose weight differs from the default."""
    rows = await connection.hgetall(redis_keys.tenant_weights())
    weights = {TenantId(tenant.decode()): float(weight) for tenant, weight in rows.items()}
    return PlanPolicy(weights, await read_pauses(connection))


class PauseRecords:
    """Writes pauses. Each survives every restart, and writing it is idempotent."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._pause_run = async_script(connection, "run_pause")

    async def pause_tenant(self, tenant: TenantId, reason: str = "") -> None:
        """Exclude a tenant's ops and sample requests from now on; planned or claimed ones finish as usual."""
        pause = encode(Pause(time.time(), reason))
        await self._redis.hset(redis_keys.paused_tenants(), tenant, pause)

    async def resume_tenant(self, tenant: TenantId) -> bool:
        """Resume a tenant. Return False if it was not paused."""
        return bool(await self._redis.hdel(redis_keys.paused_tenants(), tenant))

    async def pause_run(self, run: RunRecord, reason: str = "") -> None:
        """Exclude the ops of a run from now on; raises RunClosed if it has ended."""
        pause = encode(Pause(time.time(), reason, run.tenant))
        if await self._pause_run({"prefix": redis_keys.prefix(run.pool), "run": run.id, "pause": pause}) == b"CLOSED":
            raise RunClosed

    async def resume_run(self, run: RunRecord) -> bool:
        """Resume a run. Return False if it was not paused."""
        return bool(await self._redis.hdel(redis_keys.paused_runs(), run.id))


async def read_pauses(connection: Connection) -> Pauses:
    """Return the paused tenants and runs."""
    tenants = await connection.hgetall(redis_keys.paused_tenants())
    runs = await connection.hgetall(redis_keys.paused_runs())
    return Pauses(
        {TenantId(name): pause for name, pause in _pauses(tenants).items()},
        {RunId(name): pause for name, pause in _pauses(runs).items()},
    )


def _pauses(rows: Mapping[bytes, bytes]) -> dict[str, Pause]:
    return {name.decode(): decode(Pause, json.loads(row)) for name, row in rows.items()}


async def run_bytes(connection: Connection, tenant: TenantId) -> int:
    """Return the bytes that a tenant's runs hold."""
    return int(await connection.zscore(redis_keys.run_bytes(), tenant) or 0)


async def largest_run_bytes(connection: Connection, count: int) -> dict[TenantId, int]:
    """Return the bytes held by runs, for the tenants with the most."""
    rows = await connection.zrange(redis_keys.run_bytes(), 0, count - 1, desc=True, withscores=True)
    return {TenantId(name.decode()): int(weight) for name, weight in rows}


def weigh_run(
    lora: LoraSpec, pool: PoolRecord, pools: Iterable[PoolRecord], quota: int, free_bytes: int
) -> RunWeight | None:
    """Return the weight of a run before it is made; None if its pool does not report the sizes.

    `quota` 0 is the default one; `free_bytes` are those of the disk above its reserve.
    """
    state = state_bytes(lora, pool)
    if not state:
        return None
    return RunWeight(
        bytes=STATES_KEPT * state,
        disk_bytes=RECOVERY_COPIES * state,
        quota=quota or default_quota(pools),
        free_bytes=max(0, free_bytes),
    )


def state_bytes(lora: LoraSpec, pool: PoolRecord) -> int:
    """Return the bytes of a run's state. A recovery copy also has a header and alignment gaps (< 1 %)."""
    trains = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    trains["experts"] = lora.train_mlp and lora.per_expert
    width = sum(width for family, width in pool.lora_widths.items() if trains[family])
    return BYTES_PER_VALUE * lora.rank * width


def default_quota(pools: Iterable[PoolRecord]) -> int:
    """Return the bytes that one tenant's runs may hold without a quota of its own."""
    largest = max((BYTES_PER_VALUE * pool.max_rank * sum(pool.lora_widths.values()) for pool in pools), default=0)
    return max(LEAST_QUOTA, LARGEST_RUNS * STATES_KEPT * largest)
