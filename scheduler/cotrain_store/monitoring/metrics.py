"""Every metric, in one place. Base units, `_total` for counters, never a run id as a label.

The API process counts what it does itself; what the scheduler and the workers did it reads from the
pool's counters in Redis, so that one scrape tells all.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry(auto_describe=True)

HTTP_REQUESTS = Counter(
    "cotrain_http_requests_total", "Requests answered.", ["route", "code"], registry=REGISTRY
)
HTTP_DURATION = Histogram(
    "cotrain_http_request_duration_seconds", "Time to answer.", ["route"], registry=REGISTRY
)
LONGPOLL_WAITERS = Gauge(
    "cotrain_longpoll_waiters", "Requests held open for a result.", registry=REGISTRY
)
REQUESTS_ACCEPTED = Counter(
    "cotrain_requests_accepted_total", "Ops accepted into the log.", ["op"], registry=REGISTRY
)
REQUESTS_DUPLICATE = Counter(
    "cotrain_requests_duplicate_total", "Ops sent again, and accepted before.", registry=REGISTRY
)
REQUESTS_REJECTED = Counter(
    "cotrain_requests_rejected_total", "Requests refused.", ["reason"], registry=REGISTRY
)
BUILD_INFO = Gauge(
    "cotrain_build_info", "1; the version is the label.", ["version"], registry=REGISTRY
)

#: What a commit adds to its pool's counters, and under which metric it is shown.
POOL_COUNTERS = {
    "cycles": ("cotrain_cycles_total", "Cycles committed."),
    "cycle_seconds": ("cotrain_cycle_duration_seconds_total", "Time spent in cycles."),
    "tokens": ("cotrain_tokens_processed_total", "Tokens of passes that are over."),
    "padding_tokens": ("cotrain_tokens_padding_total", "Filler tokens added to fill a bucket."),
    "forwards": ("cotrain_base_forwards_total", "Forward passes of the base model."),
    "optim_steps": ("cotrain_optim_steps_total", "Optimizer steps."),
    "failed_ops": ("cotrain_requests_failed_total", "Ops that resolved to a failure."),
    "resolved_ops": ("cotrain_requests_resolved_total", "Ops that resolved, failures included."),
    "nonfinite": (
        "cotrain_nonfinite_total",
        "Ops refused because a loss or gradient was not finite.",
    ),
    "sample_requests": ("cotrain_sample_requests_total", "Sample requests resolved."),
    "sampled_tokens": ("cotrain_sampled_tokens_total", "Tokens generated."),
    "prompt_tokens": ("cotrain_prompt_tokens_total", "Prompt tokens of sample requests."),
    "cached_prompt_tokens": (
        "cotrain_prompt_tokens_cached_total",
        "Prompt tokens of sample requests that were there already.",
    ),
    "replayed_ops": ("cotrain_replay_ops_total", "Ops run again after a restart."),
    "reassignments": (
        "cotrain_reassignments_total",
        "Dead workers whose work was given to another one.",
    ),
    "poison_ops": (
        "cotrain_poison_ops_total",
        "Requests given up: processes crashed during them alone.",
    ),
    "rollbacks": (
        "cotrain_rollbacks_total",
        "Runs that lost their newest state and went on from a checkpoint.",
    ),
    "diverged_runs": ("cotrain_replay_divergence_total", "Runs stopped because a replay differed."),
}
