"""Write the boards as Grafana reads them, and the alerts as Prometheus does: `python -m` this, or `make boards`.

What the two boards show: their panels, in order. A test walks the list, and a Prometheus in a test answers each query.

What wakes an operator: a value, from when on it is too much, and for how long. The page says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
            ("cotrain_worker_restoring_ops", "ops left to restore {{worker}}"),
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


#: Where the paragraph of each alert is: below this heading, under the alert's own.
PAGE = "docs/operate/alerts.md"


@dataclass(frozen=True)
class Alert:
    """One alert."""

    name: str
    expr: str
    """What is compared; it always has a value."""
    condition: str
    lasts: str
    """How long that must hold, as Prometheus writes times."""
    summary: str

    @property
    def anchor(self) -> str:
        """Name the paragraph of the page that says what to do."""
        return self.name.lower()


def _refused() -> str:
    refused = "(sum(rate(cotrain_requests_rejected_total[10m])) or vector(0))"
    return f"{refused} / ({refused} + sum(rate(cotrain_requests_accepted_total[10m])))"


ALERTS = (
    Alert("CotrainNotReady", "max(cotrain_ready) or vector(0)", "< 1", "2m",
          "The server does not train what is sent now; /readyz says why."),
    Alert("CotrainWorkerAway", "cotrain_worker_up", "< 1", "5m",
          "Worker {{ $labels.worker }} of {{ $labels.pool }} gives no heartbeat."),
    Alert("CotrainNoLeader", "max(cotrain_scheduler_leader) or vector(0)", "< 1", "10s",
          "No scheduler plans: nothing is trained."),
    Alert("CotrainOldOp", "cotrain_queue_oldest_seconds", "> 60", "5m",
          "An op of {{ $labels.pool }} waits for {{ $value }} s."),
    Alert("CotrainBacklog", "cotrain_pool_backlog_seconds", "> 600", "5m",
          "What waits for {{ $labels.pool }} takes {{ $value }} s."),
    Alert("CotrainGap", "cotrain_seq_gap_seconds_max", "> 120", "0s",
          "A run of {{ $labels.pool }} waits for a request that did not come for {{ $value }} s."),
    Alert("CotrainReplayDiverged", "increase(cotrain_replay_divergence_total[15m])", "> 0", "0s",
          "A run of {{ $labels.pool }} was stopped: its replay gave other numbers."),
    Alert("CotrainPoison", "increase(cotrain_poison_ops_total[15m])", "> 0", "0s",
          "A request of {{ $labels.pool }} was given up: workers crashed during it."),
    Alert("CotrainRollback", "increase(cotrain_rollbacks_total[15m])", "> 0", "0s",
          "A run of {{ $labels.pool }} lost its newest state and went on from a checkpoint."),
    Alert("CotrainDiskLow", "cotrain_disk_free_bytes / cotrain_disk_reserve_bytes", "< 2", "1m",
          "The disk is nearly full: below its reserve nothing new is accepted."),
    Alert("CotrainRedisMemory", "cotrain_redis_memory_ratio", "> 0.7", "5m",
          "Redis uses {{ $value | humanizePercentage }} of its memory; above 80 % nothing new is accepted."),
    Alert("CotrainRefusals", _refused(), "> 0.05", "10m",
          "{{ $value | humanizePercentage }} of all requests are refused."),
    Alert("CotrainSnapshotOld", "cotrain_snapshot_age_seconds_max / cotrain_snapshot_due_seconds", "> 2", "1m",
          "Recovery copies of worker {{ $labels.worker }} are overdue: a crash would cost a long replay."),
)  # fmt: skip


FOLDER = Path(__file__).parents[4] / "docker" / "observe"
#: Grafana chooses it by the width of a chart and the time between two scrapes.
RANGE = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "cotrain"}
_COLUMNS, _HEIGHT, _NUMBERS_HEIGHT = 24, 8, 4


def files() -> Mapping[Path, str]:
    """Return all files by their name below `FOLDER`."""
    boards = {
        Path("grafana/boards") / f"{board.uid}.json": json.dumps(board_of(board), indent=1) + "\n"
        for board in BOARDS
    }
    return {Path("rules.yml"): rules(), **boards}


def board_of(board: Board) -> dict[str, Any]:
    """Return a board: numbers in rows of four, charts in rows of two."""
    numbers = [panel for panel in board.panels if panel.is_number]
    charts = [panel for panel in board.panels if not panel.is_number]
    below = -(-len(numbers) // 4) * _NUMBERS_HEIGHT
    panels = [
        _panel(panel, at, 4, 0, _NUMBERS_HEIGHT) for at, panel in enumerate(numbers)
    ] + [_panel(panel, at, 2, below, _HEIGHT) for at, panel in enumerate(charts)]  # fmt: skip
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["cotrain"],
        "editable": False,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _panel(panel: Panel, at: int, columns: int, top: int, height: int) -> dict[str, Any]:
    width = _COLUMNS // columns
    row, column = divmod(at, columns)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    return {
        "title": panel.title,
        "description": panel.about,
        "type": "stat" if panel.is_number else "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * width, "y": top + row * height, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expr.replace("$range", RANGE),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def rules() -> str:
    """Return the rules of Prometheus."""
    written = "\n".join(map(_rule, ALERTS))
    return f"# Written by `make boards`.\ngroups:\n- name: cotrain\n  rules:\n{written}\n"


def _rule(alert: Alert) -> str:
    return f"""\
  - alert: {alert.name}
    expr: {json.dumps(f"({alert.expr}) {alert.condition}")}
    for: {alert.lasts}
    labels: {{severity: page}}
    annotations:
      summary: {json.dumps(alert.summary, ensure_ascii=False)}
      runbook_url: {PAGE}#{alert.anchor}"""


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
