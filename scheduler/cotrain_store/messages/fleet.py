"""Worker heartbeats, pauses, plan policy and the record of a pool's scaling decision. Pure.

The leading scheduler decides and stores the last decision as a record of the pool. Every API process shows it, and the
next scheduler continues from it. Times are those of hosts, in s since 1970.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cotrain_store.messages.ids import RunId, TenantId, WorkerId, decode


@dataclass(frozen=True)
class WorkerHeartbeat:
    """Last state that a live worker reported."""

    id: WorkerId
    epoch: int
    state: str
    """`serving`, `draining` or `drained`. A worker drains from the operator's request on, or when
    its process must end. It is drained once no run is left on it.
    """
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    seen_at: float
    restored_ops: int = 0
    samples_running: int = 0
    samples_waiting: int = 0  # sample requests that are claimed and not yet in the decoder's batch
    sample_tokens_per_s: float = 0.0
    """Recent token rate of sample requests while some ran, prompts included; 0 if not yet measured."""
    safe_tokens: int = 0
    """Token limit of one pass of the base model by memory; lower than configured after memory ran out."""
    halvings: int = 0  # number of times that memory ran out and halved `safe_tokens`
    lora: str = ""  # Implementation that computes LoRA, as named in its numerics: fused or seg
    lora_fallback: str = ""
    """Reason why `lora` is not the fastest implementation for a GPU; empty if it is."""
    host: str = ""
    parked_runs: int = 0  # number of `runs` whose adapters are offloaded to host memory
    is_handing_over: bool = False
    """The worker is draining to another worker or shutting down; the scheduler plans nothing for it."""
    accepts_saves: bool = True
    """False while its disk is too far behind. A save then waits, and blocks its run."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    """Phase (train, optim, sample, idle) → s since the process started; the sum is that time."""
    duty: dict[str, float] = field(default_factory=dict)
    """Phase → its share of the last minute; the sum is 1."""
    device_memory_bytes: int = 0  # memory in use on the device, by any process; 0 on a CPU
    device_memory_limit_bytes: int = 0
    kv_cache_ratio: float | None = None
    """Share of the pages for keys and values that sequences hold; None if another server samples."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Location in memory (device, host) → number of adapters."""
    adapter_bytes: dict[str, int] = field(default_factory=dict)
    """Location in memory → bytes of its adapters."""
    adapter_limit_bytes: int = 0  # limit of the adapters on the device; 0 for no limit
    unstored_bytes: int = 0  # bytes of saved weights that are not on disk yet
    snapshot_age_s: float = 0.0
    """Training that no recovery copy holds, in s of computing, for the run with the most."""
    snapshot_due_s: float = 0.0  # at how much of it a copy of that run is due
    restoring: dict[str, int] | None = None
    """Progress of the runs that it restores from their logs now: `runs_done`, `runs`, `ops_done`, `ops`.
    None: it restores none."""
    self_check: dict[str, Any] | None = None
    """Result of the last self-check of this process: `asked_at`, `at`, `took_s`, `ok`, `problem`, `runs`, `tokens`,
    `tolerance`, and the largest differences of `logprobs`, `gradients`, `weights` and `samples`. None: there was none."""
    members: list[dict[str, int]] = field(default_factory=list)
    """`runs` and `memory_bytes` of each process of a group; empty if the worker is one process."""

    @property
    def busy(self) -> float:
        """Share of the last minute that the worker computed, sampling included."""
        return sum(share for phase, share in self.duty.items() if phase != "idle")


@dataclass(frozen=True)
class WorkerExit:
    """Last exit of a worker's process that its supervisor did not request."""

    at: float  # In s since 1970
    count: int  # Number of exits since its supervisor started
    reason: str  # Exit status, or the sentence of a process that refused to start
    since: float = 0.0  # Time of the first exit after it last ran well, in s since 1970

    @property
    def text(self) -> str:
        """Return the number of restarts and the reason."""
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"restarted {times}, last reason: {self.reason}"


@dataclass(frozen=True)
class WorkerSlot:
    """One worker id of a pool. Later processes may use the same id."""

    worker: WorkerId
    epoch: int  # epoch of the newest process
    heartbeat: WorkerHeartbeat | None  # None while no process has this id
    open_steps: int = 0  # number of steps that are planned for it and not yet committed


@dataclass(frozen=True)
class Move:
    """Requested move of a run from its owner to another worker."""

    run: RunId
    owner: WorkerId
    to: WorkerId

    @classmethod
    def parse(cls, run: bytes, workers: bytes) -> Self:
        """Return the move in a field and its value, `owner>target`, of a pool's hash of moves."""
        owner, _, to = workers.decode().partition(">")
        return cls(RunId(run.decode()), WorkerId(owner), WorkerId(to))


def restoring_text(progress: Mapping[str, int] | None) -> str:
    """Return `WorkerHeartbeat.restoring` in words: `3 of 12 runs, 41 of 200 ops`; "" where nothing is restored."""
    if not progress:
        return ""
    of_runs, of_ops = (f"{progress[f'{each}_done']} of {progress[each]} {each}" for each in ("runs", "ops"))
    return f"{of_runs}, {of_ops}"


#: Default weight of a tenant.
WEIGHT = 1.0
LEAST_WEIGHT, MAX_WEIGHT = 0.1, 10.0


@dataclass(frozen=True)
class Pause:
    """Start and reason of a pause of a tenant or a run."""

    since: float  # in s since 1970
    reason: str = ""
    tenant: TenantId | None = None  # tenant of a paused run

    def notice(self, what: str) -> str:
        """Return the reason shown to waiting clients; `what` is "tenant" or "run"."""
        suffix = f": {self.reason}" if self.reason else ""
        return f"the operator has paused this {what}{suffix}"


@dataclass(frozen=True)
class Pauses:
    """Paused tenants and runs. Their requests are accepted and wait."""

    tenants: Mapping[TenantId, Pause] = field(default_factory=dict)
    runs: Mapping[RunId, Pause] = field(default_factory=dict)

    def notice(self, tenant: TenantId, run: RunId | None = None) -> str | None:
        """Return the reason why requests of a tenant or of one of its runs wait; None if they are not paused."""
        if tenant in self.tenants:
            return self.tenants[tenant].notice("tenant")
        pause = self.runs.get(run) if run else None
        return pause.notice("run") if pause else None


@dataclass(frozen=True)
class PlanPolicy:
    """Tenant weights and pauses that the planner applies when it selects work."""

    weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Tenants whose weight differs from the default."""
    pauses: Pauses = field(default_factory=Pauses)


#: An older record is invalid, because no scheduler leads.
STALE_S = 30.0


@dataclass(frozen=True)
class Bounds:
    """Limits of the operator on the number of workers of each pool."""

    least: int = 1  # 0: a pool without work has no worker
    most: int = 0  # 0: no limit
    idle_s: float = 900.0  # idle time after which the last worker of a pool may stop

    def within(self, workers: int) -> int:
        """Return the number of workers, limited to the bounds."""
        raised = max(workers, self.least)
        return min(raised, self.most) if self.most else raised


@dataclass(frozen=True)
class Span:
    """Minimum and maximum of the workers needed in SPAN_S."""

    start: float
    least: int
    most: int


@dataclass(frozen=True)
class Scaling:
    """Number of workers wanted for a pool, and the inputs of that decision."""

    wanted: int
    at: float  # time of the decision
    busy_at: float  # time when the pool last had work
    bounds: Bounds = field(default_factory=Bounds)
    spans: tuple[Span, ...] = ()  # spans of the last DOWN_AFTER_S, oldest first
    waiting_tokens: Mapping[WorkerId, int] = field(default_factory=dict)
    """Tokens waiting for each worker at the scheduler's last plan."""

    def is_current(self, now: float) -> bool:
        """Return True if a scheduler made this decision within STALE_S."""
        return abs(now - self.at) < STALE_S


def parse_scaling(row: bytes | None) -> Scaling | None:
    """Return the decision of a record, or None if there is no record."""
    if row is None:
        return None
    found = json.loads(row)
    found["bounds"] = Bounds(**found["bounds"])
    found["spans"] = tuple(Span(**span) for span in found["spans"])
    return decode(Scaling, found)
