"""The keys of a pool, of its workers and of the scheduler, and where every key of a pool begins.

What a pool did in a minute, by the fields under which its hash holds it: for the charts of the last hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.samples import SampleUsage

#: Bumped when a key or a message changes; a process refuses a store of another version.
SCHEMA_VERSION = "2"
#: A worker that has not said it is alive for this long is not counted as ready.
WORKER_HEARTBEAT_TTL_MS = 10_000
#: The scheduler's lease: decides who tries, not who may (the epoch does that).
LEASE_TTL_MS = 3_000
#: Cycle records kept for the dashboard and for debugging.
CYCLES_KEPT = 1_000
#: What happened in a minute is kept for this long: the pages show an hour.
MINUTE_TTL_S = 2 * 3600


def schema() -> str:
    """Name the schema version key; lives permanently."""
    return "cotrain:schema"


def name() -> str:
    """Name the key with this Redis' own random name, which its data folder holds, too; lives permanently."""
    return "cotrain:name"


def sweeper() -> str:
    """Name the lease of the worker that sweeps spool and recovery copies in an object store (SweepLease)."""
    return "cotrain:sweeper"


def pool_sweeper(pool: PoolId) -> str:
    """Name the lease of the worker that sweeps a pool's saved weights in an object store (SweepLease)."""
    return f"{prefix(pool)}sweeper"


def pools() -> str:
    """Name the hash of pools (id → PoolRecord); a worker writes its own at start."""
    return "cotrain:pools"


def prefix(pool: PoolId) -> str:
    """Start every key of a pool."""
    return f"cotrain:{hash_tag(pool)}"


def hash_tag(pool: PoolId) -> str:
    """Name a pool within a member of a set; `cotrain:` before it starts its keys."""
    return f"{{{pool}}}:"


def scheduler_lease() -> str:
    """Name the scheduler's lease; expires unless renewed."""
    return "cotrain:scheduler:lease"


def scheduler_epoch() -> str:
    """Name the scheduler's fencing number; only grows."""
    return "cotrain:scheduler:epoch"


def notify_scheduler() -> str:
    """Name the channel that tells the scheduler that something became ready or free."""
    return "cotrain:notify:scheduler"


def notify_worker(pool: PoolId, worker: WorkerId) -> str:
    """Name the channel that tells a worker that a step or an order to drop a run is there."""
    return f"{prefix(pool)}notify:{worker}"


def workers(pool: PoolId) -> str:
    """Name the set of worker ids that serve this pool; one that is dead for long is struck off.

    A run whose worker is none of these has none.
    """
    return f"{prefix(pool)}workers"


def draining(pool: PoolId) -> str:
    """Name the hash of worker id → when (s) the operator asked that its runs go elsewhere; until it is taken back.

    It outlives the worker's processes.
    """
    return f"{prefix(pool)}draining"


def moves(pool: PoolId) -> str:
    """Name the hash of run → `owner>target`: runs that are to go to another worker; a field goes with the move."""
    return f"{prefix(pool)}moves"


def scaling(pool: PoolId) -> str:
    """Name the record (JSON `Scaling`) of how many workers a pool is to have; the scheduler that leads writes it."""
    return f"{prefix(pool)}scaling"


def worker(pool: PoolId, worker_id: WorkerId) -> str:
    """Name a worker's heartbeat (JSON); expires unless renewed."""
    return f"{prefix(pool)}worker:{worker_id}"


def worker_epoch(pool: PoolId, worker_id: WorkerId) -> str:
    """Name a worker's fencing number; only grows."""
    return f"{prefix(pool)}epoch:{worker_id}"


def open_steps(pool: PoolId, worker: WorkerId) -> str:
    """Name the hash cycle → Step of one worker: planned and not yet committed."""
    return f"{prefix(pool)}open:{worker}"


def drops(pool: PoolId, worker: WorkerId) -> str:
    """Name the set of runs a worker shall drop from memory; emptied by the worker."""
    return f"{prefix(pool)}drops:{worker}"


def starts(pool: PoolId) -> str:
    """Name the hash cycle → how many processes crashed during it after the first; a field goes with its step.

    -1: the first one did not crash.
    """
    return f"{prefix(pool)}starts"


def crash_counts(pool: PoolId) -> str:
    """Name the hash part of a step → how many processes crashed during it; a field goes with its step.

    A part is named by the request that it begins with, and anything behind.
    """
    return f"{prefix(pool)}deaths"


def cycle_counter(pool: PoolId) -> str:
    """Name the number of the last cycle; only grows."""
    return f"{prefix(pool)}cycle"


def cycles(pool: PoolId) -> str:
    """Name the list of the last CYCLES_KEPT cycle records, newest first."""
    return f"{prefix(pool)}cycles"


def minute(pool: PoolId, start_s: int) -> str:
    """Name the hash of what a pool did in the minute that began then (`minute_fields`); MINUTE_TTL_S."""
    return f"{prefix(pool)}minute:{start_s}"


def counters(pool: PoolId) -> str:
    """Name the hash of a pool's totals (cycles, tokens, …), for /metrics; only grow.

    `moves` counts runs that went to another worker. Of runs: `runs_made`, and of those `runs_closed` and `runs_failed`.
    """
    return f"{prefix(pool)}counters"


#: Of the whole pool; times in s.
FIELDS = (
    "cycles", "tokens", "padding_tokens", "ops", "failed", "train_s", "optim_s", "sampled_tokens", "sample_s",
)  # fmt: skip


def minute_of(now_s: float) -> int:
    """Give the start of a minute, in s since the epoch."""
    return int(now_s // 60) * 60


def tenant_tokens(tenant: TenantId | str) -> str:
    """Name the tokens that a tenant trained on."""
    return f"tokens|{tenant}"


def tenant_seconds(tenant: TenantId | str) -> str:
    """Name the seconds of the device that a tenant used, training or sampling."""
    return f"device_s|{tenant}"


def cycle_counts(
    record: Mapping[str, Any],
    usage: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
) -> dict[str, float]:
    """Count a cycle, from the record that its history keeps."""
    tokens = record.get("tokens", 0)
    padded = record.get("padded_tokens") or tokens
    counts: dict[str, float] = {
        "cycles": 1,
        "tokens": tokens,
        "padding_tokens": padded - tokens,
        "train_s": (record.get("wave_ms") or 0) / 1000,
        "optim_s": (record.get("optim_ms") or 0) / 1000,
    }
    for run in record.get("runs", ()):
        name = tenant_tokens(run["tenant"])
        counts[name] = counts.get(name, 0) + run["tokens"]
        counts["ops"] = counts.get("ops", 0) + sum(run["ops"].values())
        counts["failed"] = counts.get("failed", 0) + run["failed"]
    for used_by, used in usage.items():
        name = tenant_seconds(tenant_by_run[used_by])
        counts[name] = counts.get(name, 0.0) + used.device_s
    return {name: value for name, value in counts.items() if value}


def sample_counts(used: SampleUsage | None) -> dict[str, float]:
    """Count a sample request that ended; nothing where that is not known."""
    if used is None:
        return {}
    counts = {"sampled_tokens": float(used.sampled_tokens), "sample_s": used.device_s}
    return {name: value for name, value in counts.items() if value}
