from __future__ import annotations

from cotrain_scheduler.pausing import going_on
from cotrain_scheduler.waiting import Waiting
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from cotrain_store.messages.pauses import Pause, Pauses

ADA, BOB = TenantId("ada"), TenantId("bob")


def queue(run: str, tenant: TenantId) -> RunQueue:
    op = QueuedOp(RunId(run), 1, OpKind.FORWARD, 10, "inline", 1, 0.0)
    return RunQueue(RunId(run), tenant, None, (op,))


def runs(waiting: Waiting) -> dict[str, list[str]]:
    return {tenant: list(of_tenant) for tenant, of_tenant in waiting.passes.items()}


WAITING = Waiting()
for each in (queue("a1", ADA), queue("a2", ADA), queue("b1", BOB)):
    WAITING.put(each)


def test_where_none_is_paused_nothing_is_copied() -> None:
    assert going_on(WAITING, Pauses()) is WAITING


def test_a_paused_tenant_is_left_out_and_the_others_go_on() -> None:
    assert runs(going_on(WAITING, Pauses({ADA: Pause(1.0)}))) == {"bob": ["b1"]}


def test_a_paused_run_is_left_out_and_the_other_runs_of_its_tenant_go_on() -> None:
    paused = Pauses(runs={RunId("a1"): Pause(1.0, tenant=ADA)})
    assert runs(going_on(WAITING, paused)) == {"ada": ["a2"], "bob": ["b1"]}


def test_a_tenant_all_of_whose_runs_are_paused_is_as_one_that_has_none() -> None:
    paused = Pauses(runs={RunId("b1"): Pause(1.0, tenant=BOB)})
    assert runs(going_on(WAITING, paused)) == {"ada": ["a1", "a2"]}
