"""Redis keys of a pool, its workers and the scheduler, and the common prefix of a pool's keys."""

from collections.abc import Callable, Mapping
from typing import Any

from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.results import SampleUsage

#: Version of keys and messages, increased when one changes. A process refuses a store of another version.
SCHEMA_VERSION = "3"
#: A worker without a heartbeat for this long does not count as ready.
WORKER_HEARTBEAT_TTL_MS = 10_000
#: The scheduler's lease decides who tries to lead. The epoch decides who may write.
LEASE_TTL_MS = 3_000
#: Number of cycle records kept for the dashboard and for debugging.
CYCLES_KEPT = 1_000
#: Lifetime of the hash of a minute. The pages show one hour.
MINUTE_TTL_S = 2 * 3600
#: Lifetime of the exits of workers after the newest one.
EXITS_TTL_S = 7 * 24 * 3600

#: Schema version; kept permanently.
schema: Callable[[], str] = "cotrain:schema".format
#: Random name of this Redis; kept permanently. Its data folder holds the same name.
name: Callable[[], str] = "cotrain:name".format
#: Lease of the worker that sweeps spool and recovery copies in an object store (SweepLease).
sweeper: Callable[[], str] = "cotrain:sweeper".format
#: Lease of the worker that sweeps a pool's saved weights in an object store (SweepLease).
pool_sweeper: Callable[[PoolId], str] = "cotrain:{{{}}}:sweeper".format
#: Hash of pools (id → PoolRecord). A worker writes its own at start.
pools: Callable[[], str] = "cotrain:pools".format
#: Prefix of every key of a pool.
prefix: Callable[[PoolId], str] = "cotrain:{{{}}}:".format


def hash_tag(pool: PoolId) -> str:
    """Return the part of a set member that names a pool; `cotrain:` before it is the prefix of the pool's keys."""
    return f"{{{pool}}}:"


#: Lease of the scheduler; expires unless renewed.
scheduler_lease: Callable[[], str] = "cotrain:scheduler:lease".format
#: Fencing number of the scheduler; only increases.
scheduler_epoch: Callable[[], str] = "cotrain:scheduler:epoch".format
#: Channel that wakes the scheduler when a run became ready or a worker free.
notify_scheduler: Callable[[], str] = "cotrain:notify:scheduler".format
#: Channel that notifies a worker of a step, or of an order to drop a run.
notify_worker: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:notify:{}".format
#: Set of worker ids that serve this pool. Workers without a heartbeat for a long time are removed. A run whose worker
#: is not in the set has no worker.
workers: Callable[[PoolId], str] = "cotrain:{{{}}}:workers".format
#: Hash worker id → time (s) of the operator's drain request, until it is withdrawn.
#: The field outlives the worker's processes.
draining: Callable[[PoolId], str] = "cotrain:{{{}}}:draining".format
#: Hash worker id → time (s) of the operator's request for a self-check; the worker deletes it when it begins.
self_checks: Callable[[PoolId], str] = "cotrain:{{{}}}:self_checks".format
#: Hash of planned moves (run → `owner>target`); a field is deleted with its move.
moves: Callable[[PoolId], str] = "cotrain:{{{}}}:moves".format
#: Scaling decision of a pool (JSON `Scaling`), written by the leading scheduler.
scaling: Callable[[PoolId], str] = "cotrain:{{{}}}:scaling".format
#: Heartbeat of the worker (JSON); expires unless renewed.
worker: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:worker:{}".format
#: Fencing number of the worker; only increases.
worker_epoch: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:epoch:{}".format
#: Hash of a base model (worker id → WorkerExit), written by their supervisor or by the workers. It expires (EXITS_TTL_S).
worker_exits: Callable[[str], str] = "cotrain:exits:{}".format
#: Hash of one worker's open steps (cycle → Step): planned and not yet committed.
open_steps: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:open:{}".format
#: Set of runs that a worker must drop from memory; emptied by the worker.
drops: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:drops:{}".format
#: Hash cycle → how many processes crashed during it after the first; a field goes with its step.
#: -1: the first one did not crash.
starts: Callable[[PoolId], str] = "cotrain:{{{}}}:starts".format
#: Hash step part → number of processes that crashed during it.
#: A field is deleted with its step. Its name begins with the first request of the part.
crash_counts: Callable[[PoolId], str] = "cotrain:{{{}}}:deaths".format
#: Number of the last cycle; only increases.
cycle_counter: Callable[[PoolId], str] = "cotrain:{{{}}}:cycle".format
#: List of the last CYCLES_KEPT cycle records, newest first.
cycles: Callable[[PoolId], str] = "cotrain:{{{}}}:cycles".format
#: Hash of a pool's counts in the minute that starts at `start_s`; expires (MINUTE_TTL_S).
minute: Callable[[PoolId, int], str] = "cotrain:{{{}}}:minute:{}".format
#: Hash of a pool's totals (cycles, tokens, …), for /metrics; they only increase. `moves` counts runs that moved to
#: another worker. `runs_made`, `runs_closed` and `runs_failed` count runs.
counters: Callable[[PoolId], str] = "cotrain:{{{}}}:counters".format
#: Hash of the failed and refused requests of all tenants in the minute that starts at `start_s`
#: (`failed|<tenant>`, `refused|<tenant>` → count); expires (MINUTE_TTL_S).
failures: Callable[[int], str] = "cotrain:failures:{}".format
#: Hash of the newest failure and refusal of each tenant, by the same fields (JSON); expires with them.
newest_failures: Callable[[], str] = "cotrain:failures:newest".format
#: Hash `<pool>|<tenant>` → failed requests, for /metrics; they only increase.
failure_totals: Callable[[], str] = "cotrain:failures:totals".format
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
    record: Mapping[str, Any], usage: Mapping[RunId, RunUsage], tenant_by_run: Mapping[RunId, TenantId]
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
