"""What runs hold at rest: known before they are made, counted until no file of them is left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_store.keys import tenant_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import LoraSpec, PoolRecord
from cotrain_store.redis_client.connection import Connection

#: Weights, gradient and both moments of Adam, each value of them 4 bytes.
BYTES_PER_VALUE = 4 * 4
#: On disk, the newest recovery copy and the one before it, …
RECOVERY_COPIES = 2
#: … and in the memory of a worker the run itself, on the device or off it.
STATES_KEPT = RECOVERY_COPIES + 1
#: Without a quota of its own a tenant may hold this much…
LEAST_QUOTA = 200_000_000_000
#: … or, where that is more, so many runs of the largest rank on the largest base model served.
LARGEST_RUNS = 8


@dataclass(frozen=True)
class RunWeight:
    """What a run will hold, and what there is for it; all in bytes."""

    bytes: int
    """Of all that it counts for."""
    disk_bytes: int
    """Of its recovery copies."""
    quota: int
    """What all runs of its tenant may hold."""
    free_bytes: int
    """Of the disk, above the reserve."""


def state_bytes(lora: LoraSpec, pool: PoolRecord) -> int:
    """Count the bytes of a run's state; a recovery copy has a header and alignment gaps besides (< 1 %)."""
    trains = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    width = sum(width for family, width in pool.lora_widths.items() if trains[family])
    return BYTES_PER_VALUE * lora.rank * width


def default_quota(pools: Iterable[PoolRecord]) -> int:
    """Count what one tenant's runs may hold where no quota says so."""
    largest = max(
        (BYTES_PER_VALUE * pool.max_rank * sum(pool.lora_widths.values()) for pool in pools),
        default=0,
    )
    return max(LEAST_QUOTA, LARGEST_RUNS * STATES_KEPT * largest)


def weigh_run(
    lora: LoraSpec, pool: PoolRecord, pools: Iterable[PoolRecord], quota: int, free_bytes: int
) -> RunWeight | None:
    """Weigh a run that is to be made; None where its pool does not say how large it will be.

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
    """Read what a tenant's runs hold."""
    return int(await connection.zscore(tenant_keys.run_bytes(), tenant) or 0)


async def largest_run_bytes(connection: Connection, most: int) -> dict[TenantId, int]:
    """Read what the runs of tenants hold, of those that hold the most."""
    rows = await connection.zrange(tenant_keys.run_bytes(), 0, most - 1, desc=True, withscores=True)
    return {TenantId(name.decode()): int(weight) for name, weight in rows}
