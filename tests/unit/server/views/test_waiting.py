"""Cause for which a run waits: one state for each cause, and one of each pair at the same time."""

from typing import Any

import pytest

from cotrain_server.views.waiting import WaitState, _duration, brief_why, why
from cotrain_store.messages.fleet import Pause, Pauses, WorkerExit, WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, RequestId, RunId, SessionId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, RunState
from cotrain_store.monitoring.failures import TenantFailures
from cotrain_store.monitoring.fleet import PoolStatus, QueueStatus, WorkerStatus
from cotrain_store.tenants.run_list import RunPosition

NOW = 1_000.0
RUN, OTHER = RunId("s:train:0"), RunId("z:train:0")
ME, YOU, W0 = TenantId("me"), TenantId("you"), WorkerId("w0")
POOL = PoolRecord(PoolId("p"), "base", "arch", 512, 1_024, 64, 9, "cpu", "float32", "n", 100.0)
IDLE = RunPosition(7, 7, 7, None, None, None, 0.0, "w0")
WAITS = RunPosition(9, 7, 7, (NOW - 9) * 1000, None, None, 0.0, "w0")
RUNS = RunPosition(9, 9, 7, None, None, None, 0.0, "w0")
GAP = RunPosition(9, 7, 7, None, 1.0, None, 0.0, "w0")


def run(state: RunState = RunState.LIVE, last: float | None = NOW - 30) -> RunRecord:
    return RunRecord(RUN, ME, SessionId("s"), POOL.id, "base", LoraSpec(4, 0), 0.0, state=state, last_request_at=last)


def heartbeat(**changes: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(W0, 1, "serving", "cpu", 100.0, 2, 0, NOW, **changes)


def pool(
    *tokens: tuple[TenantId, int], alive: bool = True, last_exit: WorkerExit | None = None, **changes: Any
) -> PoolStatus:
    worker = WorkerStatus(W0, heartbeat(**changes) if alive else None, 0, None, True, last_exit)
    queues = tuple(QueueStatus(tenant, 1, count, 0) for tenant, count in tokens)
    return PoolStatus(POOL, (worker,), queues=queues)


def step(*ops: tuple[RunId, TenantId, int], allowances: dict[RequestId, int] | None = None) -> Step:
    queued = tuple(QueuedOp(name, 9, OpKind.FORWARD_BACKWARD, count, "inline", 0, 0.0) for name, _, count in ops)
    owners = {name: tenant for name, tenant, _ in ops}
    return Step(4, W0, queued, NOW - 12, owners, allowances or {})


SAVE = QueuedOp(RUN, 8, OpKind.SAVE, 0, "inline", 0, 0.0)
CRASHED = WorkerExit(NOW - 5, 3, "exit status 1 at /srv/models")
PAUSED = Pauses(tenants={ME: Pause(0.0, "invoice")})
REFUSED = TenantFailures(0, 4, NOW - 10, "The queue of this tenant is full: 256 of 256 ops.", "", status=429)
WRONG = TenantFailures(0, 1, NOW - 10, "The training run was unloaded.", "", status=400)
PROGRESS = {"runs_done": 1, "runs": 3, "ops_done": 4, "ops": 9}
CAUSES = [
    ("ended", {"run": run(RunState.CLOSED), "position": WAITS}, "The run has ended"),
    ("failed", {"run": run(RunState.FAILED), "position": WAITS}, "a replay after a crash"),
    ("idle", {"position": IDLE}, "the next one of its client. The last one came 30 s ago."),
    ("quota", {"position": IDLE, "refused": REFUSED}, "10 s ago: The queue of this tenant is full: 256"),
    ("idle", {"position": IDLE, "refused": WRONG}, "the next one of its client. The last one came 30 s ago."),
    ("paused", {"position": WAITS, "pauses": PAUSED}, "The operator has paused this tenant: invoice."),
    ("no_scheduler", {"position": WAITS, "has_scheduler": False}, "No scheduler is running"),
    ("no_worker", {"position": WAITS, "pool": None}, "No worker serves its base model base."),
    ("no_worker", {"position": WAITS, "pool": pool(alive=False)}, "base at the moment."),
    ("restarting", {"position": RUNS, "pool": pool(alive=False, last_exit=CRASHED)}, "restarted 3 times."),
    ("restoring", {"position": RUNS, "pool": pool(restoring=PROGRESS)}, "1 of 3 runs, 4 of 9 ops are done"),
    ("draining", {"position": WAITS, "pool": pool(is_handing_over=True)}, "moves to another one"),
    ("gap", {"position": GAP, "missing": "Waiting for seq_id 8."}, "Waiting for seq_id 8."),
    ("running", {"position": RUNS, "steps": (step((RUN, ME, 70), (OTHER, YOU, 9_000)),)},
     "Cycle 4 computes 2 requests of it, with 70 tokens among those of 2 runs."),
    ("large_pass", {"position": RUNS, "steps": (
        step((RUN, ME, 9_000), allowances={RequestId(f"{RUN}:9"): 2_048}),)}, "9,000 tokens, more than"),
    ("large_pass", {"position": WAITS, "steps": (step((OTHER, YOU, 9_000)),)},
     "A pass of 9,000 tokens of another tenant is ahead, in a cycle that began 12 s ago."),
    ("large_pass", {"position": WAITS, "steps": (step((OTHER, ME, 9_000)),)}, f"of run {OTHER} is ahead"),
    ("disk", {"position": WAITS, "next_op": SAVE, "pool": pool(accepts_saves=False)}, "earlier saves to disk"),
    ("gather", {"position": WAITS, "pool": pool((YOU, 50))}, "the gather window"),
    ("share", {"position": WAITS, "pool": pool((ME, 70), (YOU, 50)), "steps": (step((OTHER, YOU, 100)),)},
     "1 other tenant with work, so this tenant gets about 50% of the tokens, and has 70 tokens queued."),
    ("share", {"position": WAITS, "pool": pool((ME, 70), (YOU, 50)), "steps": (step((OTHER, YOU, 100)),),
     "weights": {ME: 3.0}}, "about 75% of the tokens"),
    ("cycle", {"position": WAITS, "steps": (step((OTHER, YOU, 100)),)}, "with 2 requests for the end"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "given", "words"), CAUSES)
def test_a_state_has_its_cause(cause: str, given: dict[str, Any], words: str) -> None:
    found = why(WaitState(**{"run": run(), "now": NOW, "pool": pool(), **given}))
    assert (found.cause, words in found.reason) == (cause, True), found.reason
    assert found.reason[0].isupper()
    assert found.reason.endswith(".")


def test_a_pause_comes_before_a_gap_and_a_crash_before_a_cycle() -> None:
    state: dict[str, Any] = {"run": run(), "now": NOW}
    assert why(WaitState(**state, position=GAP, pauses=PAUSED)).cause == "paused"
    crashed = pool(alive=False, last_exit=CRASHED)
    found = WaitState(**state, position=RUNS, pool=crashed, shows_exits=True)
    assert why(found).reason.endswith("The last reason: exit status 1 at /srv/models.")
    old = TenantFailures(0, 1, NOW - 90, "full", "", status=429)
    assert why(WaitState(**state, position=IDLE, refused=old)).cause == "idle"


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"position": IDLE}, "idle", "All its requests are done."),
        ({"position": WAITS}, "cycle", "It waits with 2 requests for a cycle."),
        ({"position": RUNS}, "running", "The current cycle computes 2 requests of it."),
        ({"position": GAP}, "gap", "Request 8 of it is missing."),
        ({"position": WAITS, "pauses": PAUSED}, "paused", "The operator has paused this tenant: invoice."),
        ({"position": RUNS, "pool": pool(alive=False, last_exit=CRASHED)}, "restarting", "Its worker is down"),
        ({"position": IDLE, "pool": pool(alive=False)}, "idle", "All its requests are done."),
    ],
)
def test_a_list_shows_a_cause_without_the_other_work_of_the_pool(
    changes: dict[str, Any], cause: str, words: str
) -> None:
    found, text = brief_why(WaitState(**{"run": run(), "now": NOW, "pool": pool(), **changes}))
    assert (found, words in text) == (cause, True), text


def test_a_long_time_is_in_minutes_or_hours() -> None:
    assert [_duration(seconds) for seconds in (-1, 30, 119, 731, 7_300)] == ["0 s", "30 s", "119 s", "12 min", "2 h"]
