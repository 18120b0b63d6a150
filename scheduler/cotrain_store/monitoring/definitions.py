"""Every metric there is: its name, kind, labels, and which process shows it. Code, docs, boards and rules read it.

Base units (seconds, bytes), `_total` for counters, never a run or a request as a label. A name is shown by one
kind of process only, so that a sum over processes counts nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Which process shows a metric."""

    #: Each API process: what it did itself.
    API = "api"
    #: The scheduler: the one that leads, and any that stands by.
    SCHEDULER = "scheduler"
    #: Each worker: what it did itself.
    WORKER = "worker"
    #: `/metrics/fleet` of any one API process: what is in the store, heartbeats of workers included.
    FLEET = "fleet"


@dataclass(frozen=True)
class Metric:
    """One metric."""

    source: Source
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper ends, in s. Without: those of prometheus_client, 5 ms to 10 s."""


#: Waiting and training: from what is at once to what takes minutes.
_LONG = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: Decoding, and ticks: from a tenth of a millisecond.
_SHORT = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_OF_POOL = ("pool",)
_OF_TENANT = ("pool", "tenant")
_OF_WORKER = ("pool", "worker")

_API = (
    Metric(Source.API, "cotrain_api_blob_failures_total", _C, "What the object store refused, or did not answer.", ("kind",)),
    Metric(Source.API, "cotrain_api_trace_spans_dropped_total", _C, "Spans of traces that no collector got.", ("reason",)),
    Metric(Source.API, "cotrain_build_info", _G, "1; the version is the label.", ("version",)),
    Metric(
        Source.API,
        "cotrain_connections_refused_total",
        _C,
        "Connections refused, closed for another, or open to health checks alone; reason says whose limit that was: process, address or tenant.",
        ("reason",),
    ),
    Metric(Source.API, "cotrain_http_request_duration_seconds", _H, "Time to answer.", ("route",)),
    Metric(Source.API, "cotrain_http_requests_total", _C, "Requests answered.", ("route", "code")),
    Metric(Source.API, "cotrain_longpoll_waiters", _G, "Requests held open for a result."),
    Metric(Source.API, "cotrain_requests_accepted_total", _C, "Ops accepted into the log.", ("op",)),
    Metric(Source.API, "cotrain_requests_duplicate_total", _C, "Ops sent again, and accepted before."),
    Metric(Source.API, "cotrain_requests_rejected_total", _C, "Requests refused.", ("reason",)),
    Metric(
        Source.API,
        "cotrain_webhook_deliveries_total",
        _C,
        "Attempts to deliver an event: delivered, retried or given_up.",
        ("outcome",),
    ),
)  # fmt: skip

_SCHEDULER = (
    Metric(Source.SCHEDULER, "cotrain_op_wait_seconds", _H, "From accepted to planned.", ("pool", "kind"), _LONG),
    Metric(Source.SCHEDULER, "cotrain_scheduler_leader", _G, "1 for the scheduler that plans, 0 for one that stands by."),
    Metric(Source.SCHEDULER, "cotrain_scheduler_tick_seconds", _H, "Time of one look at a pool, plans included.", _OF_POOL, _SHORT),
    Metric(Source.SCHEDULER, "cotrain_scheduler_trace_spans_dropped_total", _C, "Spans of traces that no collector got.", ("reason",)),
)  # fmt: skip

_WORKER = (
    Metric(Source.WORKER, "cotrain_cycle_duration_seconds", _H, "Time of a cycle, sampling in it included.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_op_latency_seconds", _H, "From accepted to resolved: to its commit, of a named save to its files.", ("pool", "worker", "kind"), _LONG),
    Metric(Source.WORKER, "cotrain_sample_inter_token_seconds", _H, "Between two tokens of a sequence.", _OF_WORKER, _SHORT),
    Metric(Source.WORKER, "cotrain_sample_queue_seconds", _H, "From accepted to given to the decoder.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_sample_time_to_first_token_seconds", _H, "From accepted to the first token.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_snapshot_seconds", _H, "Time to write a recovery copy.", _OF_WORKER, _LONG),
    Metric(Source.WORKER, "cotrain_tenant_device_seconds_total", _C, "Time of the device that a tenant's training and sampling took.", ("pool", "worker", "tenant")),
    Metric(Source.WORKER, "cotrain_worker_blob_failures_total", _C, "What the object store refused, or did not answer.", ("kind",)),
    Metric(Source.WORKER, "cotrain_worker_trace_spans_dropped_total", _C, "Spans of traces that no collector got.", ("reason",)),
)  # fmt: skip

_STORE = (
    Metric(Source.FLEET, "cotrain_checkpoint_bytes", _G, "Stored checkpoints, of those tenants that have the most.", ("tenant",)),
    Metric(Source.FLEET, "cotrain_disk_free_bytes", _G, "Free space under the data folder."),
    Metric(Source.FLEET, "cotrain_disk_reserve_bytes", _G, "Below this much free space new work is refused."),
    Metric(Source.FLEET, "cotrain_oplog_bytes", _G, "Size of the append-only file."),
    Metric(Source.FLEET, "cotrain_ready", _G, "Whether requests sent now would be trained on, as /readyz says."),
    Metric(Source.FLEET, "cotrain_redis_aof_last_write_ok", _G, "Whether Redis could write its log."),
    Metric(Source.FLEET, "cotrain_redis_memory_bytes", _G, "Memory Redis uses."),
    Metric(Source.FLEET, "cotrain_redis_memory_limit_bytes", _G, "Memory Redis may use; 0: as much as there is."),
    Metric(Source.FLEET, "cotrain_redis_memory_ratio", _G, "Of the memory Redis may use, what it uses; 0 without a limit."),
    Metric(Source.FLEET, "cotrain_redis_up", _G, "Whether Redis answers."),
    Metric(Source.FLEET, "cotrain_run_bytes", _G, "What live runs hold in memory and on disk, of those tenants that hold the most.", ("tenant",)),
)  # fmt: skip

_POOL = (
    Metric(Source.FLEET, "cotrain_open_cycles", _G, "Planned, not committed.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_pool_backlog_seconds", _G, "What waits and is not held back with its tenant, at the rate of the workers there are; without any, at the rate measured last.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_pool_workers_wanted", _G, "Workers that a pool is to have: those that end what waits within a minute, held steady.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_queue_oldest_seconds", _G, "Age of the oldest op.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_queue_ops", _G, "Ops accepted, not committed.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_queue_tokens", _G, "Tokens accepted, not run.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_runs", _G, "Runs that were made, by what became of them: live, closed, failed.", ("pool", "state")),
    Metric(Source.FLEET, "cotrain_samples_running", _G, "Samples a worker runs.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_samples_waiting", _G, "Samples that wait for a worker.", _OF_TENANT),
    Metric(Source.FLEET, "cotrain_saved_weights", _G, "Saved weights on record.", _OF_POOL),
    Metric(Source.FLEET, "cotrain_seq_gap_seconds_max", _G, "Age of the oldest gap.", _OF_POOL),
)  # fmt: skip

#: From heartbeats; a counter begins anew with its worker's process.
_HEARTBEAT = (
    Metric(Source.FLEET, "cotrain_adapter_bytes", _G, "Bytes of adapters in memory: on the device, or offloaded to the host. Those of other live runs are recovery copies on disk.", ("pool", "worker", "tier")),
    Metric(Source.FLEET, "cotrain_adapters", _G, "Adapters in memory: on the device, or offloaded to the host. Of the other live runs there are recovery copies on disk.", ("pool", "worker", "tier")),
    Metric(Source.FLEET, "cotrain_device_seconds_total", _C, "Time of the device, by what it did (train, optim, sample, idle); all four add up to the time there was.", ("pool", "worker", "phase")),
    Metric(Source.FLEET, "cotrain_kv_cache_usage_ratio", _G, "Of the pages for keys and values, those that sequences hold.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_owed_save_bytes", _G, "Saved weights that are not on disk yet.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_snapshot_age_seconds_max", _G, "Training that no recovery copy holds, of the run with the most.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_snapshot_due_seconds", _G, "At this much a recovery copy of that run is due.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_device_memory_bytes", _G, "Memory of the device in use; 0 on a CPU.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_device_memory_limit_bytes", _G, "Memory the device has; 0 on a CPU.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_epoch", _G, "Starts of this worker.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_halvings_total", _C, "Micro-batches that did not fit into memory.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_lora_fell_back", _G, "1 where LoRA is not computed by the fastest kernels for a GPU; the page Workers says why.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_memory_bytes", _G, "Memory of the host in use.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_restored_ops_total", _C, "Ops this process ran again to restore runs.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_restoring_ops", _G, "Ops left to run again before runs that it restores can go on; 0: it restores none.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_safe_tokens", _G, "Tokens that one pass of the base model has memory for.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_samples_running", _G, "Sample requests claimed and not answered.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_samples_waiting", _G, "Of those, what has not begun.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_takes_saves", _G, "0 while its disk is too far behind for more saves.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_tokens_per_second", _G, "Measured rate of training, while it trains.", _OF_WORKER),
    Metric(Source.FLEET, "cotrain_worker_up", _G, "1 for a live worker, 0 for one that is unavailable.", _OF_WORKER),
)  # fmt: skip

#: What commits add to their pool's counters in Redis, by the name of the counter; they outlive every process.
POOL_COUNTERS = {
    name: Metric(Source.FLEET, metric, _C, text, _OF_POOL)
    for name, metric, text in (
        ("cycles", "cotrain_cycles_total", "Cycles committed."),
        ("cycle_seconds", "cotrain_cycle_duration_seconds_total", "Time spent in cycles."),
        ("tokens", "cotrain_tokens_processed_total", "Tokens of passes that are over."),
        ("padding_tokens", "cotrain_tokens_padding_total", "Filler tokens added to fill a bucket."),
        ("forwards", "cotrain_base_forwards_total", "Forward passes of the base model."),
        ("optim_steps", "cotrain_optim_steps_total", "Optimizer steps."),
        ("failed_ops", "cotrain_requests_failed_total", "Ops that resolved to a failure."),
        ("resolved_ops", "cotrain_requests_resolved_total", "Ops that resolved, failures included."),
        ("nonfinite", "cotrain_nonfinite_total", "Ops refused because a loss or gradient was not finite."),
        ("sample_requests", "cotrain_sample_requests_total", "Sample requests resolved."),
        ("sampled_tokens", "cotrain_sampled_tokens_total", "Tokens generated."),
        ("prompt_tokens", "cotrain_prompt_tokens_total", "Prompt tokens of sample requests."),
        ("cached_prompt_tokens", "cotrain_prompt_tokens_cached_total", "Prompt tokens of sample requests that were there already."),
        ("replayed_ops", "cotrain_replay_ops_total", "Ops run again after a restart."),
        ("moves", "cotrain_moves_total", "Runs that went from one worker to another, with nothing replayed."),
        ("reassignments", "cotrain_reassignments_total", "Dead workers whose work was given to another one."),
        ("poison_ops", "cotrain_poison_ops_total", "Requests given up: processes crashed during them alone."),
        ("rollbacks", "cotrain_rollbacks_total", "Runs that lost their newest state and went on from a checkpoint."),
        ("diverged_runs", "cotrain_replay_divergence_total", "Runs stopped because a replay differed."),
    )
}  # fmt: skip

METRICS = {
    metric.name: metric
    for metric in (*_API, *_SCHEDULER, *_WORKER, *_STORE, *_POOL, *_HEARTBEAT, *POOL_COUNTERS.values())
}  # fmt: skip


def of(source: Source) -> tuple[Metric, ...]:
    """List the metrics that one kind of process shows."""
    return tuple(metric for metric in METRICS.values() if metric.source is source)
