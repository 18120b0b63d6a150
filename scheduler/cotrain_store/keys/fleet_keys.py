"""The keys of a pool, of its workers and of the scheduler, and where every key of a pool begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, WorkerId

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
    """Name the hash cycle → how many processes crashed during it; a field goes with its step."""
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
