"""The workers of a pool: where each one belongs, and what it last said about itself.

What the operator holds back, and in which proportion tenants that wait are served.

How many workers a pool is to have: what its work needs, held steady so that an autoscaler does not go to and fro.

Pure. The scheduler that leads decides, and keeps the last decision as a record of the pool, which every API process
shows and the next scheduler goes on from. Times are those of hosts, in s since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cotrain_store.messages.ids import RunId, TenantId, WorkerId


@dataclass(frozen=True)
class WorkerHeartbeat:
    """What a live worker says about itself."""

    id: WorkerId
    epoch: int
    state: str
    """`serving`; `draining` from the operator's request on, or once its process is to end; `drained` once nothing is
    left here."""
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    seen_at: float
    restored_ops: int = 0
    samples_running: int = 0
    samples_waiting: int = 0
    """Claimed, and not yet in the decoder's batch."""
    sample_tokens_per_s: float = 0.0
    """What sample requests got lately while there were any, prompts included; 0: not known yet."""
    safe_tokens: int = 0
    """What one pass of the base model has memory for; less than was set up once memory ran out."""
    halvings: int = 0
    """How often that was."""
    lora: str = ""
    """What computes LoRA, as its numerics name it: fused, auto, grouped or seg."""
    lora_fallback: str = ""
    """Why it is not the fastest that there is for a GPU; empty where it is."""
    host: str = ""
    parked_runs: int = 0
    """Of `runs`, those whose adapters are offloaded to host memory."""
    is_handing_over: bool = False
    """It is to be drained, and another worker is there; or its process is to end. Nothing is planned for it."""
    accepts_saves: bool = True
    """False while its disk is too far behind: a save waits then, and its run behind it."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    """Phase (train, optim, sample, idle) → s since the process began; they add up to that time."""
    duty: dict[str, float] = field(default_factory=dict)
    """Phase → its part of the last minute; they add up to 1."""
    device_memory_bytes: int = 0
    """In use on the device, by anything; 0 on a CPU."""
    device_memory_limit_bytes: int = 0
    kv_cache_ratio: float | None = None
    """Of the pages for keys and values, the part that sequences hold; None: another server samples."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Where in memory (device, host) → how many adapters."""
    adapter_bytes: dict[str, int] = field(default_factory=dict)
    """The same → their bytes."""
    adapter_limit_bytes: int = 0
    """What adapters may take of the device; 0: no limit."""
    unstored_bytes: int = 0
    """Saved weights that are not on disk yet."""
    snapshot_age_s: float = 0.0
    """Training that no recovery copy holds, in s of computing, of the run with the most."""
    snapshot_due_s: float = 0.0
    """At how much of it a copy of that run is due."""
    restoring: dict[str, int] | None = None
    """Progress of the runs that it restores from their logs now: `runs_done`, `runs`, `ops_done`, `ops`.
    None: it restores none."""
    members: list[dict[str, int]] = field(default_factory=list)
    """Of a group, what each of its processes holds: `runs` and `memory_bytes`; none where a worker is one process."""


@dataclass(frozen=True)
class WorkerSlot:
    """One worker id of a pool. Its process may be another one tomorrow."""

    worker: WorkerId
    epoch: int
    """Of the process that came last."""
    heartbeat: WorkerHeartbeat | None
    """None while no process has this id."""


def restoring_text(progress: Mapping[str, int] | None) -> str:
    """Return `WorkerHeartbeat.restoring` in words: `3 of 12 runs, 41 of 200 ops`; "" where nothing is restored."""
    if not progress:
        return ""
    of_runs, of_ops = (
        f"{progress[f'{each}_done']} of {progress[each]} {each}" for each in ("runs", "ops")
    )
    return f"{of_runs}, {of_ops}"


#: Of every tenant that was given no other.
WEIGHT = 1.0
LEAST_WEIGHT, MAX_WEIGHT = 0.1, 10.0


@dataclass(frozen=True)
class Pause:
    """Since when a tenant or a run is held back, and what the operator said about it."""

    since: float
    """In s since 1970."""
    reason: str = ""
    tenant: TenantId | None = None
    """Of a run that is paused."""

    def notice(self, what: str) -> str:
        """Say to those who wait why; `what` is `tenant` or `run`."""
        suffix = f": {self.reason}" if self.reason else ""
        return f"the operator has paused this {what}{suffix}"


@dataclass(frozen=True)
class Pauses:
    """All tenants and runs that are held back: what they send is accepted, and waits."""

    tenants: Mapping[TenantId, Pause] = field(default_factory=dict)
    runs: Mapping[RunId, Pause] = field(default_factory=dict)

    def notice(self, tenant: TenantId, run: RunId | None = None) -> str | None:
        """Say why requests of a tenant, of one of its runs, wait; None where they are not held back."""
        if tenant in self.tenants:
            return self.tenants[tenant].notice("tenant")
        pause = self.runs.get(run) if run else None
        return pause.notice("run") if pause else None


@dataclass(frozen=True)
class PlanPolicy:
    """What the planner heeds of tenants when it chooses whose work is next."""

    weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Of those that have another one than WEIGHT."""
    pauses: Pauses = field(default_factory=Pauses)


#: More workers are wanted once so many were needed for this long; the first one at once.
UP_AFTER_S = 30.0
#: Fewer are wanted once no more were needed for this long.
DOWN_AFTER_S = 300.0
#: What was needed is remembered by the least and the most of so long.
SPAN_S = 10.0
#: A record that is older says nothing: no scheduler leads.
STALE_S = 30.0


NOTHING: Mapping[WorkerId, int] = MappingProxyType({})


@dataclass(frozen=True)
class Bounds:
    """What the operator allows, for each pool."""

    least: int = 1
    """0: a pool without work has no worker."""
    most: int = 0
    """0: no limit."""
    idle_s: float = 900.0
    """A pool that had nothing to do for so long has no work."""

    def within(self, workers: int) -> int:
        """Bring a number of workers within the bounds."""
        raised = max(workers, self.least)
        return min(raised, self.most) if self.most else raised


@dataclass(frozen=True)
class Span:
    """The least and the most workers that were needed in SPAN_S."""

    start: float
    least: int
    most: int


@dataclass(frozen=True)
class Scaling:
    """How many workers are wanted, and what that is decided by."""

    wanted: int
    at: float
    """When this was decided."""
    busy_at: float
    """When something was last to be done."""
    bounds: Bounds = field(default_factory=Bounds)
    spans: tuple[Span, ...] = ()
    """Of the last DOWN_AFTER_S, oldest first."""
    waiting_tokens: Mapping[WorkerId, int] = field(default_factory=dict)
    """Of each worker, as the scheduler knew them when it last planned."""

    def after(
        self,
        needed: int,
        now: float,
        bounds: Bounds,
        waiting_tokens: Mapping[WorkerId, int] = NOTHING,
    ) -> Scaling:
        """Decide anew, from what is needed now. After a clock that was set back the times begin anew."""
        spans = _noted(() if now < self.at else self.spans, needed, now)
        busy_at = now if needed else min(self.busy_at, now)
        wanted = max(self.wanted, min(needed, 1))
        if _covers(spans, now, UP_AFTER_S):
            lately = [span.least for span in spans if span.start + SPAN_S > now - UP_AFTER_S]
            wanted = max(wanted, min(lately))
        if _covers(spans, now, DOWN_AFTER_S):
            wanted = min(wanted, max(span.most for span in spans))
        if wanted == 0 < self.wanted and now - busy_at < bounds.idle_s:
            wanted = 1  # the last one stays for longer
        return Scaling(bounds.within(wanted), now, busy_at, bounds, spans, dict(waiting_tokens))

    def differs(self, other: Scaling, after_s: float) -> bool:
        """Tell whether this is news to those who know the other one, or that one is so old."""
        mine = self.wanted, self.bounds, self.waiting_tokens
        theirs = other.wanted, other.bounds, other.waiting_tokens
        return mine != theirs or not 0 <= self.at - other.at < after_s

    def is_current(self, now: float) -> bool:
        """Tell whether a scheduler decided this lately."""
        return abs(now - self.at) < STALE_S


def first_scaling(workers: int, now: float, bounds: Bounds) -> Scaling:
    """Begin with the workers there are, as if they had had work until now."""
    return Scaling(bounds.within(workers), now, now, bounds)


def parse_scaling(row: bytes | None) -> Scaling | None:
    """Read a record; None where there is none."""
    if row is None:
        return None
    found = json.loads(row)
    return Scaling(
        wanted=int(found["wanted"]),
        at=float(found["at"]),
        busy_at=float(found["busy_at"]),
        bounds=Bounds(**found["bounds"]),
        spans=tuple(Span(**span) for span in found["spans"]),
        waiting_tokens={WorkerId(name): n for name, n in found["waiting_tokens"].items()},
    )


def _noted(spans: tuple[Span, ...], needed: int, now: float) -> tuple[Span, ...]:
    kept = tuple(span for span in spans if span.start + SPAN_S > now - DOWN_AFTER_S)
    if kept and now < kept[-1].start + SPAN_S:
        last = kept[-1]
        grown = Span(last.start, min(last.least, needed), max(last.most, needed))
        return (*kept[:-1], grown)
    return (*kept, Span(now, needed, needed))


def _covers(spans: tuple[Span, ...], now: float, duration_s: float) -> bool:
    """Tell whether spans say what was needed since `duration_s` ago, to within one of them."""
    return now - spans[0].start >= duration_s - SPAN_S
