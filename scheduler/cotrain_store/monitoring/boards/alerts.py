"""What wakes an operator: a value, from when on it is too much, and for how long. The page says what to do."""

from __future__ import annotations

from dataclasses import dataclass

#: Where the paragraph of each alert is: below this heading, under the alert's own.
PAGE = "docs/reliability.md"


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
