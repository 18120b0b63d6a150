"""Bytes that runs hold in storage: known before a run is made, counted until its last file is deleted."""

from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import LoraSpec, PoolRecord
from cotrain_store.redis_client.connection import Connection

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


async def run_bytes(connection: Connection, tenant: TenantId) -> int:
    """Return the bytes that a tenant's runs hold."""
    return int(await connection.zscore(redis_keys.run_bytes(), tenant) or 0)


async def largest_run_bytes(connection: Connection, most: int) -> dict[TenantId, int]:
    """Return the bytes held by runs, for the tenants with the most."""
    rows = await connection.zrange(redis_keys.run_bytes(), 0, most - 1, desc=True, withscores=True)
    return {TenantId(name.decode()): int(weight) for name, weight in rows}
