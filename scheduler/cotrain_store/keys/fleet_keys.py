"""Redis keys of a pool, its workers and the scheduler, and the common prefix of a pool's keys.

`cycle_counts` and `sample_counts` return the fields of a minute's hash, for the charts of the last
hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.samples import SampleUsage

#: Version of keys and messages, increased when one changes. A process refuses a store of another
#: version.
SCHEMA_VERSION = "3"
#: A worker without a heartbeat for this long does not count as ready.
WORKER_HEARTBEAT_TTL_MS = 10_000
#: The scheduler's lease decides who tries to lead. The epoch decides who may write.
LEASE_TTL_MS = 3_000
#: Number of cycle records kept for the dashboard and for debugging.
CYCLES_KEPT = 1_000
#: Lifetime of the hash of a minute. The pages show one hour.
MINUTE_TTL_S = 2 * 3600


def schema() -> str:
    """Return the key of the schema version; kept permanently."""
    return "cotrain:schema"


def name() -> str:
    """Return the key of the random name of this Redis; kept permanently. Its data folder holds the
    same name.
    """
    return "cotrain:name"


def sweeper() -> str:
    """Return the lease of the worker that sweeps spool and recovery copies in an object store
    (SweepLease).
    """
    return "cotrain:sweeper"


def pool_sweeper(pool: PoolId) -> str:
    """Return the lease of the worker that sweeps a pool's saved weights in an object store
    (SweepLease).
    """
    return f"{prefix(pool)}sweeper"


def pools() -> str:
    """Return the key of the hash of pools (id → PoolRecord). A worker writes its own at start."""
    return "cotrain:pools"


def prefix(pool: PoolId) -> str:
    """Return the prefix of every key of a pool."""
    return f"cotrain:{hash_tag(pool)}"


def hash_tag(pool: PoolId) -> str:
    """Return the part of a set member that names a pool; `cotrain:` before it is the prefix of the
    pool's keys.
    """
    return f"{{{pool}}}:"


def scheduler_lease() -> str:
    """Return the key of the scheduler's lease; expires unless renewed."""
    return "cotrain:scheduler:lease"


def scheduler_epoch() -> str:
    """Return the key of the scheduler's fencing number; only increases."""
    return "cotrain:scheduler:epoch"


def notify_scheduler() -> str:
    """Return the channel that wakes the scheduler when a run became ready or a worker free."""
    return "cotrain:notify:scheduler"


def notify_worker(pool: PoolId, worker: WorkerId) -> str:
    """Return the channel that notifies a worker of a step, or of an order to drop a run."""
    return f"{prefix(pool)}notify:{worker}"


def workers(pool: PoolId) -> str:
    """Return the key of the set of worker ids that serve this pool.

    Workers without a heartbeat for a long time are removed. A run whose worker is not in the set
    has no worker.
    """
    return f"{prefix(pool)}workers"


def draining(pool: PoolId) -> str:
    """Return the key of the hash worker id → time (s) of the operator's drain request, until it is
    withdrawn.

    The field outlives the worker's processes.
    """
    return f"{prefix(pool)}draining"


def moves(pool: PoolId) -> str:
    """Return the key of the hash of planned moves (run → `owner>target`); a field is deleted with
    its move.
    """
    return f"{prefix(pool)}moves"


def scaling(pool: PoolId) -> str:
    """Return the key of the scaling decision of a pool (JSON `Scaling`), written by the leading
    scheduler.
    """
    return f"{prefix(pool)}scaling"


def worker(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of a worker's heartbeat (JSON); expires unless renewed."""
    return f"{prefix(pool)}worker:{worker_id}"


def worker_epoch(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of a worker's fencing number; only increases."""
    return f"{prefix(pool)}epoch:{worker_id}"


def open_steps(pool: PoolId, worker: WorkerId) -> str:
    """Return the key of the hash of one worker's open steps (cycle → Step): planned and not yet
    committed.
    """
    return f"{prefix(pool)}open:{worker}"


def drops(pool: PoolId, worker: WorkerId) -> str:
    """Return the key of the set of runs that a worker must drop from memory; emptied by the
    worker.
    """
    return f"{prefix(pool)}drops:{worker}"


def starts(pool: PoolId) -> str:
    """Return the key of the hash cycle → number of processes that crashed during it after the first.

    The value -1 means that the first one did not crash. A field is deleted with its step.
    """
    return f"{prefix(pool)}starts"


def crash_counts(pool: PoolId) -> str:
    """Return the key of the hash step part → number of processes that crashed during it.

    A field is deleted with its step. Its name begins with the first request of the part.
    """
    return f"{prefix(pool)}deaths"


def cycle_counter(pool: PoolId) -> str:
    """Return the key of the number of the last cycle; only increases."""
    return f"{prefix(pool)}cycle"


def cycles(pool: PoolId) -> str:
    """Return the key of the list of the last CYCLES_KEPT cycle records, newest first."""
    return f"{prefix(pool)}cycles"


def minute(pool: PoolId, start_s: int) -> str:
    """Return the key of the hash of a pool's counts in the minute that starts at `start_s`; expires
    (MINUTE_TTL_S).
    """
    return f"{prefix(pool)}minute:{start_s}"


def counters(pool: PoolId) -> str:
    """Return the key of the hash of a pool's totals (cycles, tokens, …), for /metrics; they only
    increase.

    `moves` counts runs that moved to another worker. `runs_made`, `runs_closed` and `runs_failed`
    count runs.
    """
    return f"{prefix(pool)}counters"


#: Fields of the whole pool; times in s.
FIELDS = (
    "cycles", "tokens", "padding_tokens", "ops", "failed", "train_s", "optim_s", "sampled_tokens", "sample_s",
)  # fmt: skip


def minute_of(now_s: float) -> int:
    """Return the start of a minute, in s since the epoch."""
    return int(now_s // 60) * 60


def tenant_tokens(tenant: TenantId | str) -> str:
    """Return the field of the tokens that a tenant trained on."""
    return f"tokens|{tenant}"


def tenant_seconds(tenant: TenantId | str) -> str:
    """Return the field of the device seconds that a tenant used, for training or sampling."""
    return f"device_s|{tenant}"


def cycle_counts(
    record: Mapping[str, Any],
    usage: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
) -> dict[str, float]:
    """Return the counts of a cycle, computed from its history record."""
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
    """Return the counts of a finished sample request; empty if its usage is unknown."""
    if used is None:
        return {}
    counts = {"sampled_tokens": float(used.sampled_tokens), "sample_s": used.device_s}
    return {name: value for name, value in counts.items() if value}
