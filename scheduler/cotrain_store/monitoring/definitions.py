"""Definitions of all metrics: name, kind, labels, and source process. Code, docs, boards and rules read them.

Metrics have base units (seconds, bytes). Counters end in `_total`. No label is a run or a request. Only one kind
of process exports a name, so a sum over processes counts nothing twice.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Process that exports a metric."""

    #: Each API process, about itself.
    API = "api"
    #: Each scheduler, leading or standby.
    SCHEDULER = "scheduler"
    #: Each worker, about itself.
    WORKER = "worker"
    #: `/metrics/fleet` of any one API process: the contents of the store, including heartbeats of workers.
    FLEET = "fleet"


@dataclass(frozen=True)
class Metric:
    """Definition of one metric."""

    source: Source
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets in s. If empty, those of prometheus_client, 5 ms to 10 s."""


#: Buckets for waiting and training: from 10 ms to 15 minutes.
_LONG = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: Buckets for decoding and ticks: from 0.1 ms to 3 s.
_SHORT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_OF_POOL = ("pool",)
_OF_TENANT = ("pool", "tenant")
_OF_WORKER = ("pool", "worker")

_API = (
    Metric(Source.API, "cotrain_api_blob_failures_total", _C, "Failed operations of the object store.", ("kind",)),
    Metric(Source.API, "cotrain_api_trace_spans_dropped_total", _C, "Trace spans that did not reach a collector.", ("reason",)),
    Metric(Source.API, "cotrain_build_info", _G, "Always 1; the version is the label.", ("version",)),
    Metric(Source.API, "cotrain_connections_refused_total", _C, "Connections refused, and requests above the open ones of a tenant. The reason is the limit: process or tenant.", ("reason",)),
    Metric(Source.API, "cotrain_http_request_duration_seconds", _H, "Time to answer a request.", ("route",)),
    Metric(Source.API, "cotrain_http_requests_total", _C, "Requests answered.", ("route", "code")),
    Metric(Source.API, "cotrain_longpoll_waiters", _G, "Requests that wait for a result."),
    Metric(Source.API, "cotrain_requests_accepted_total", _C, "Ops accepted into the log.", ("op",)),
    Metric(Source.API, "cotrain_requests_duplicate_total", _C, "Repeated ops that had already been accepted."),
    Metric(Source.API, "cotrain_requests_rejected_total", _C, "Requests rejected.", ("reason",)),
    Metric(Source.API, "cotrain_tenant_requests_refused_total", _C, "Refused requests of a tenant; without missing resources and wrong keys.", ("tenant", "reason")),
    Metric(Source.API, "cotrain_webhook_deliveries_total", _C, "Delivery attempts of events, by outcome: delivered, retried or given_up.", ("outcome",)),
)  # fmt: skip

_SCHEDULER = (
    Metric(Source.SCHEDULER, "cotrain_op_wait_seconds", _H, "Time from acceptance to planning.", ("pool", "kind"), _LONG),
    Metric(Source.SCHEDULER, "cotrain_scheduler_leader", _G, "1 for the leading scheduler, 0 for a standby."),
    Metric(Source.SCHEDULER, "cotrain_scheduler_tick_seconds", _H, "Time of one tick of a pool, including planning.", _OF_POOL, _SHORT),
    Metric(Source.SCHEDULER, "cotrain_scheduler_trace_spans_dropped_total", _C, "Trace spans that did not reach a collector.", ("reason",)),
)  # fmt: skip

_WORKER = (
    Metric(Source.WORKER, "cotrain_cycle_duration_seconds", _H, "Time of a cycle, including sampling.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_op_latency_seconds", _H, "Time from acceptance to the commit of an op; for a named save, until its files are durable.", ("pool", "worker", "kind"), _LONG),
    Metric(Source.WORKER, "cotrain_sample_inter_token_seconds", _H, "Time between two tokens of a sequence.", _OF_WORKER, _SHORT),
    Metric(Source.WORKER, "cotrain_sample_queue_seconds", _H, "Time from acceptance to submission to the decoder.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_sample_time_to_first_token_seconds", _H, "Time from acceptance to the first token.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_snapshot_seconds", _H, "Time to write a recovery copy.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_tenant_device_seconds_total", _C, "Device time of a tenant's training and sampling.", ("pool", "worker", "tenant")),
    Metric(Source.WORKER, "cotrain_worker_blob_failures_total", _C, "Failed operations of the object store.", ("kind",)),
    Metric(Source.WORKER, "cotrain_worker_trace_spans_dropped_total", _C, "Trace spans that did not reach a collector.", ("reason",)),
)  # fmt: skip

_STORE = (
    Metric(Source.FLEET, "cotrain_checkpoint_bytes", _G, "Stored checkpoints of the tenants with the most.", ("tenant",)),
    Metric(Source.FLEET, "cotrain_disk_free_bytes", _G, "Free disk space of the data folder."),
    Metric(Source.FLEET, "cotrain_disk_reserve_bytes", _G, "Free disk space below which new work is rejected."),
    Metric(Source.FLEET, "cotrain_disk_total_bytes", _G, "Size of the disk of the data folder."),
    Metric(Source.FLEET, "cotrain_oplog_bytes", _G, "Size of the append-only file."),
    Metric(Source.FLEET, "cotrain_ready", _G, "1 if the server can run new requests, as in /readyz."),
    Metric(Source.FLEET, "cotrain_redis_aof_last_write_ok", _G, "1 if the last write of Redis to its log succeeded."),
    Metric(Source.FLEET, "cotrain_redis_memory_bytes", _G, "Memory used by Redis."),
    Metric(Source.FLEET, "cotrain_redis_memory_limit_bytes", _G, "Memory limit of Redis; 0: no limit."),
    Metric(Source.FLEET, "cotrain_redis_memory_ratio", _G, "Used fraction of the memory limit of Redis; 0 without a limit."),
    Metric(Source.FLEET, "cotrain_redis_up", _G, "1 if Redis responds."),
    Metric(Source.FLEET, "cotrain_run_bytes", _G, "Memory and disk used by live runs, for the tenants with the most.", ("tenant",)),
)  # fmt: skip

_POOL = (
    Metric(Source.FLEET, "cotrain_open_cycles", _G, "Cycles planned and not committed.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_pool_backlog_seconds", _G, "Time to finish pending work of tenants that are not paused, at the rate of the live workers; without workers, at the last measured rate.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_pool_workers_wanted", _G, "Recommended number of workers, which would finish pending work within a minute; smoothed.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_queue_oldest_seconds", _G, "Age of the oldest pending op.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_queue_ops", _G, "Ops accepted and not committed.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_queue_tokens", _G, "Tokens accepted and not executed.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_runs", _G, "Runs created, by state: live, closed or failed.", ("pool", "state")),
    Metric(Source.FLEET, "cotrain_samples_running", _G, "Running sample requests.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_samples_waiting", _G, "Pending sample requests.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_saved_weights", _G, "Saved weights on record.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_tenant_requests_failed_total", _C, "Failed ops and sample requests, for the tenants with the most.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_seq_gap_seconds_max", _G, "Age of the oldest sequence gap.", _OF_POOL),
)  # fmt: skip

#: Metrics from heartbeats. A counter restarts at 0 with its worker's process.
_HEARTBEAT = (
    Metric(Source.FLEET, "cotrain_adapter_bytes", _G, "Bytes of adapters in memory, on the device or offloaded to the host. Other live runs are recovery copies on disk.", ("pool", "worker", "tier")),
    Metric(Source.FLEET, "cotrain_adapters", _G, "Adapters in memory, on the device or offloaded to the host. Other live runs are recovery copies on disk.", ("pool", "worker", "tier")),
    Metric(Source.FLEET, "cotrain_device_seconds_total", _C, "Device time by phase: train, optim, sample or idle. The four sum to the total time.", ("pool", "worker", "phase")),
    Metric(Source.FLEET, "cotrain_kv_cache_usage_ratio", _G, "Used fraction of the KV-cache pages.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_owed_save_bytes", _G, "Saved weights that are not yet on disk.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_snapshot_age_seconds_max", _G, "Training time without a recovery copy, of the run with the most.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_snapshot_due_seconds", _G, "Training time at which a recovery copy of that run is due.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_device_memory_bytes", _G, "Device memory in use; 0 on a CPU.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_device_memory_limit_bytes", _G, "Total device memory; 0 on a CPU.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_epoch", _G, "Number of starts of this worker.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_halvings_total", _C, "Micro-batches that did not fit into memory.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_lora_fell_back", _G, "1 if LoRA does not use the fastest kernels for a GPU; the page Workers shows the reason.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_memory_bytes", _G, "Host memory in use.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_restored_ops_total", _C, "Ops replayed by this process to restore runs.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_restoring_ops", _G, "Ops left to replay in the restore in progress; 0 without one.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_safe_tokens", _G, "Maximum tokens of one pass of the base model that fit into memory.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_samples_running", _G, "Sample requests claimed and not finished.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_samples_waiting", _G, "Sample requests claimed and not started.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_self_check_difference", _G, "Largest difference of the last self-check of a worker between an adapter alone and in a mix, relative to the largest value, by kind.", ("pool", "worker", "kind")),
    Metric(Source.FLEET, "cotrain_worker_self_check_ok", _G, "1 if the last self-check of a worker passed, 0 if it failed; missing before the first one.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_takes_saves", _G, "0 while the disk is too slow to accept more saves, else 1.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_tokens_per_second", _G, "Measured training speed.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_up", _G, "1 for a live worker, 0 for an unavailable one.", _OF_WORKER),
)  # fmt: skip

#: Pool counters in Redis, by name. Commits increase them, and they outlive every process.
POOL_COUNTERS = {
    name: Metric(Source.FLEET, metric, _C, text, _OF_POOL)
    for name, metric, text in (
        ("cycles", "cotrain_cycles_total", "Cycles committed."),
        ("cycle_seconds", "cotrain_cycle_duration_seconds_total", "Time spent in cycles."),
        ("tokens", "cotrain_tokens_processed_total", "Tokens of finished passes."),
        ("padding_tokens", "cotrain_tokens_padding_total", "Filler tokens added to fill a bucket."),
        ("forwards", "cotrain_base_forwards_total", "Forward passes of the base model."),
        ("optim_steps", "cotrain_optim_steps_total", "Optimizer steps."),
        ("failed_ops", "cotrain_requests_failed_total", "Ops that resolved to a failure."),
        ("resolved_ops", "cotrain_requests_resolved_total", "Ops that resolved, failures included."),
        ("nonfinite", "cotrain_nonfinite_total", "Ops that failed because a loss or gradient was not finite."),
        ("sample_requests", "cotrain_sample_requests_total", "Sample requests resolved."),
        ("sampled_tokens", "cotrain_sampled_tokens_total", "Tokens generated."),
        ("prompt_tokens", "cotrain_prompt_tokens_total", "Prompt tokens of sample requests."),
        ("cached_prompt_tokens", "cotrain_prompt_tokens_cached_total", "Prompt tokens of sample requests that were cached."),
        ("replayed_ops", "cotrain_replay_ops_total", "Ops replayed after a restart."),
        ("moves", "cotrain_moves_total", "Runs moved to another worker without a replay."),
        ("reassignments", "cotrain_reassignments_total", "Crashed workers whose work was reassigned to another worker."),
        ("poison_ops", "cotrain_poison_ops_total", "Requests that failed because processes crashed while running them alone."),
        ("rollbacks", "cotrain_rollbacks_total", "Runs that lost their newest state and continued from a checkpoint."),
        ("diverged_runs", "cotrain_replay_divergence_total", "Runs stopped because a replay differed."),
    )
}  # fmt: skip

METRICS = {
    metric.name: metric
    for metric in (*_API, *_SCHEDULER, *_WORKER, *_STORE, *_POOL, *_HEARTBEAT, *POOL_COUNTERS.values())
}  # fmt: skip


def of(source: Source) -> tuple[Metric, ...]:
    """Return the metrics that one kind of process exports."""
    return tuple(metric for metric in METRICS.values() if metric.source is source)
