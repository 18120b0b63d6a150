"""What the two boards show: their panels, in order. A test walks the list, and a Prometheus in a test answers each query."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """One line, or one for each set of labels that is left."""

    expr: str
    """PromQL; `[$range]` is the span that rates look back."""
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart, or one number."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """As Grafana names it: s, bytes, percentunit, ops, short."""
    is_number: bool = False
    is_stacked: bool = False
    about: str = ""


@dataclass(frozen=True)
class Board:
    """One board."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def _lines(*queries: tuple[str, str]) -> tuple[Query, ...]:
    return tuple(Query(expr, legend) for expr, legend in queries)


def _quantiles(histogram: str, by: str = "") -> tuple[Query, ...]:
    """Ask for the middle and the slow end of a histogram, for each value of a label or of all."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    rates = f"sum by ({labels}) (rate({histogram}_bucket[$range]))"
    return _lines(
        (f"histogram_quantile(0.5, {rates})", f"half{legend}"),
        (f"histogram_quantile(0.95, {rates})", f"95 %{legend}"),
    )


def _by(label: str, expr: str) -> tuple[Query, ...]:
    return _lines((f"sum by ({label}) ({expr})", f"{{{{{label}}}}}"))


def _largest(label: str, expr: str) -> tuple[Query, ...]:
    return _lines((f"topk(10, sum by ({label}) ({expr}))", f"{{{{{label}}}}}"))


SERVER = Board(
    "cotrain-server",
    "cotrain: Server",
    (
        Panel("Ready", _lines(("cotrain_ready", "")), is_number=True),
        Panel("Workers", _lines(("sum(cotrain_worker_up)", "")), is_number=True),
        Panel("Workers wanted", _lines(("sum(cotrain_pool_workers_wanted)", "")), is_number=True),
        Panel("Backlog", _lines(("max(cotrain_pool_backlog_seconds)", "")), "s", is_number=True),
        Panel("What the devices do", _by("phase", "rate(cotrain_device_seconds_total[$range])"),
              is_stacked=True, about="Seconds a second: 1 for each device, idle included."),
        Panel("Whose the devices' time is", _largest("tenant", "rate(cotrain_tenant_device_seconds_total[$range])"),
              is_stacked=True),
        Panel("Tokens a second", _lines(
            ("sum by (pool) (rate(cotrain_tokens_processed_total[$range]))", "trained {{pool}}"),
            ("sum by (pool) (cotrain_worker_tokens_per_second)", "measured {{pool}}"),
            ("sum by (pool) (rate(cotrain_tokens_padding_total[$range]))", "filler {{pool}}"),
        ), about="Measured: the rate while it trains."),
        Panel("Cycles", _lines(
            ("sum by (pool) (rate(cotrain_cycles_total[$range]))", "cycles {{pool}}"),
            ("sum by (pool) (rate(cotrain_base_forwards_total[$range]))", "forwards {{pool}}"),
            ("sum by (pool) (rate(cotrain_optim_steps_total[$range]))", "optimizer steps {{pool}}"),
            ("sum by (pool) (cotrain_open_cycles)", "open {{pool}}"),
        ), "ops"),
        Panel("Time of a cycle", (
            *_quantiles("cotrain_cycle_duration_seconds"),
            Query("sum by (pool) (rate(cotrain_cycle_duration_seconds_total[$range]))", "part of all time {{pool}}"),
        ), "s"),
        Panel("Accepted to planned", _quantiles("cotrain_op_wait_seconds", "kind"), "s"),
        Panel("Accepted to resolved", _quantiles("cotrain_op_latency_seconds", "kind"), "s"),
        Panel("Requests resolved", _lines(
            ("sum(rate(cotrain_requests_resolved_total[$range]))", "resolved"),
            ("sum(rate(cotrain_requests_failed_total[$range]))", "failed"),
            ("sum(rate(cotrain_nonfinite_total[$range]))", "not finite"),
        ), "ops"),
        Panel("Backlog by pool", _lines(("cotrain_pool_backlog_seconds", "{{pool}}")), "s"),
        Panel("Tokens that wait", _largest("tenant", "cotrain_queue_tokens"), is_stacked=True),
        Panel("Ops that wait", _largest("tenant", "cotrain_queue_ops"), is_stacked=True),
        Panel("Oldest", _lines(
            ("max by (pool) (cotrain_queue_oldest_seconds)", "op {{pool}}"),
            ("max by (pool) (cotrain_seq_gap_seconds_max)", "gap {{pool}}"),
        ), "s"),
        Panel("Scheduler", (
            *_quantiles("cotrain_scheduler_tick_seconds"),
            Query("sum(cotrain_scheduler_leader)", "leaders"),
        ), "s", about="One look at a pool, and how many processes lead: one."),
        Panel("HTTP", _by("code", "rate(cotrain_http_requests_total[$range])"), "ops"),
        Panel("Time to answer", (
            Query("histogram_quantile(0.95, sum by (le, route) (rate(cotrain_http_request_duration_seconds_bucket[$range])))",
                  "95 % {{route}}"),
        ), "s", about="A held poll takes as long as it is held."),
        Panel("Accepted and refused", _lines(
            ("sum(rate(cotrain_requests_accepted_total[$range]))", "accepted"),
            ("sum(rate(cotrain_requests_duplicate_total[$range]))", "sent again"),
            ("sum by (reason) (rate(cotrain_requests_rejected_total[$range])) or vector(0)", "refused {{reason}}"),
        ), "ops"),
        Panel("Connections refused", _by("reason", "rate(cotrain_connections_refused_total[$range])"), "ops",
              about="At the limit of the process, of one address, or of one tenant."),
        Panel("Polls held open", _lines(("sum(cotrain_longpoll_waiters)", "polls"))),
        Panel("Recovery copies", (
            *_quantiles("cotrain_snapshot_seconds"),
            Query("cotrain_snapshot_age_seconds_max", "not covered {{worker}}"),
            Query("cotrain_snapshot_due_seconds", "due {{worker}}"),
        ), "s"),
        Panel("Saves that wait for the disk", _lines(
            ("cotrain_owed_save_bytes", "{{worker}}"),
        ), "bytes"),
        Panel("Takes saves", _lines(("cotrain_worker_takes_saves", "{{worker}}"))),
        Panel("LoRA not by the fastest kernels", _lines(("cotrain_worker_lora_fell_back", "{{worker}}"))),
        Panel("Adapters", _lines(("cotrain_adapters", "{{worker}} {{tier}}")), is_stacked=True),
        Panel("Bytes of adapters", _lines(("cotrain_adapter_bytes", "{{worker}} {{tier}}")), "bytes", is_stacked=True),
        Panel("Memory of workers", _lines(
            ("cotrain_worker_memory_bytes", "host {{worker}}"),
            ("cotrain_worker_device_memory_bytes", "device {{worker}}"),
            ("cotrain_worker_device_memory_limit_bytes", "all of the device {{worker}}"),
        ), "bytes"),
        Panel("Too little memory", _lines(
            ("increase(cotrain_worker_halvings_total[$range])", "halvings {{worker}}"),
            ("cotrain_worker_safe_tokens", "tokens of a micro-batch {{worker}}"),
        )),
        Panel("Runs", _lines(("sum by (state) (cotrain_runs)", "{{state}}")), is_stacked=True),
        Panel("What runs hold", _largest("tenant", "cotrain_run_bytes"), "bytes", is_stacked=True),
        Panel("Checkpoints", _largest("tenant", "cotrain_checkpoint_bytes"), "bytes", is_stacked=True),
        Panel("Saved weights", _lines(("sum by (pool) (cotrain_saved_weights)", "{{pool}}"))),
        Panel("Redis", _lines(("cotrain_redis_memory_ratio", "of its memory")), "percentunit"),
        Panel("Redis, bytes", _lines(
            ("cotrain_redis_memory_bytes", "memory"),
            ("cotrain_redis_memory_limit_bytes", "limit"),
            ("cotrain_oplog_bytes", "append-only file"),
        ), "bytes"),
        Panel("Redis answers and writes", _lines(
            ("cotrain_redis_up", "answers"),
            ("cotrain_redis_aof_last_write_ok", "writes"),
        )),
        Panel("Disk", _lines(
            ("cotrain_disk_free_bytes", "free"),
            ("cotrain_disk_reserve_bytes", "reserve"),
        ), "bytes"),
        Panel("Recoveries", _lines(
            ("increase(cotrain_replay_ops_total[$range])", "ops run again {{pool}}"),
            ("increase(cotrain_moves_total[$range])", "runs moved {{pool}}"),
            ("increase(cotrain_worker_restored_ops_total[$range])", "ops restored {{worker}}"),
            ("increase(cotrain_reassignments_total[$range])", "reassigned {{pool}}"),
            ("increase(cotrain_poison_ops_total[$range])", "given up {{pool}}"),
            ("increase(cotrain_rollbacks_total[$range])", "rolled back {{pool}}"),
            ("increase(cotrain_replay_divergence_total[$range])", "diverged {{pool}}"),
            ("changes(cotrain_worker_epoch[$range])", "starts {{worker}}"),
        )),
        Panel("Webhooks", _lines(
            ("sum by (outcome) (rate(cotrain_webhook_deliveries_total[$range])) or vector(0)", "{{outcome}}"),
        ), "ops"),
        Panel("Failures of the object store", _lines(
            ("sum(rate(cotrain_api_blob_failures_total[$range])) or vector(0)", "API"),
            ("sum(rate(cotrain_worker_blob_failures_total[$range])) or vector(0)", "workers"),
        ), "ops"),
        Panel("Spans that no collector got", _lines(
            ("sum(rate(cotrain_api_trace_spans_dropped_total[$range])) or vector(0)", "API"),
            ("sum(rate(cotrain_scheduler_trace_spans_dropped_total[$range])) or vector(0)", "scheduler"),
            ("sum(rate(cotrain_worker_trace_spans_dropped_total[$range])) or vector(0)", "workers"),
        ), "ops"),
        Panel("Versions", _lines(("count by (version) (cotrain_build_info)", "{{version}}"))),
    ),
)  # fmt: skip

SAMPLING = Board(
    "cotrain-sampling",
    "cotrain: Sampling",
    (
        Panel("Waiting", _lines(("sum(cotrain_samples_waiting)", "")), is_number=True),
        Panel("Running", _lines(("sum(cotrain_samples_running)", "")), is_number=True),
        Panel("Pages in use", _lines(("max(cotrain_kv_cache_usage_ratio)", "")), "percentunit", is_number=True),
        Panel("Tokens a second", _lines(("sum(rate(cotrain_sampled_tokens_total[$range]))", "")), is_number=True),
        Panel("Time to the first token", _quantiles("cotrain_sample_time_to_first_token_seconds"), "s"),
        Panel("Time of the next token", _quantiles("cotrain_sample_inter_token_seconds"), "s"),
        Panel("Waiting for the decoder", _quantiles("cotrain_sample_queue_seconds"), "s"),
        Panel("Requests", _lines(("sum by (pool) (rate(cotrain_sample_requests_total[$range]))", "{{pool}}")), "ops"),
        Panel("Tokens", _lines(
            ("sum by (pool) (rate(cotrain_sampled_tokens_total[$range]))", "generated {{pool}}"),
            ("sum by (pool) (rate(cotrain_prompt_tokens_total[$range]))", "of prompts {{pool}}"),
            ("sum by (pool) (rate(cotrain_prompt_tokens_cached_total[$range]))", "of prompts, there already {{pool}}"),
        )),
        Panel("Prompts found in memory", _lines(
            ("sum by (pool) (rate(cotrain_prompt_tokens_cached_total[$range]))"
             " / sum by (pool) (rate(cotrain_prompt_tokens_total[$range]))", "{{pool}}"),
        ), "percentunit"),
        Panel("Pages for keys and values", _lines(("cotrain_kv_cache_usage_ratio", "{{worker}}")), "percentunit"),
        Panel("Sampling's part of the devices", _lines(
            ('sum by (worker) (rate(cotrain_device_seconds_total{phase="sample"}[$range]))', "{{worker}}"),
        ), "percentunit"),
        Panel("Who waits", _largest("tenant", "cotrain_samples_waiting"), is_stacked=True),
        Panel("Who runs", _largest("tenant", "cotrain_samples_running"), is_stacked=True),
        Panel("In workers", _lines(
            ("cotrain_worker_samples_running", "claimed {{worker}}"),
            ("cotrain_worker_samples_waiting", "not begun {{worker}}"),
        )),
    ),
)  # fmt: skip

BOARDS = (SERVER, SAMPLING)
