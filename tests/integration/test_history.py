"""History of a run: each point once and unchanged, also after repeats; thinned, cut, and under a
quota."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cotrain.wire.rest import HistoryPoint
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, TenantId, encode
from cotrain_store.messages.ops import OpKind, Result, Step
from cotrain_store.messages.runs import HistoryEntry, MetricsEntry, PassEntry, RunRecord, StepEntry
from cotrain_store.redis_client.scripts import SCRIPTS
from cotrain_store.tenants.history import read_history, read_metrics, read_points
from cotrain_store.tenants.webhooks import Webhooks
from tests.support.log import WORKER, Log
from tests.support.samples import Samples
from tests.support.stack import POOL

#: Numbers whose last digits a conversion to text in Lua would lose.
LOSS, NORM, RATE = 0.1 + 0.2, 1 / 3, 1e-4 / 7


def commit(log: Log, step: Step, found: Mapping[Any, HistoryEntry]) -> None:
    results = {op.id: Result.of_json({}) for op in step.ops}
    log.execution.commit(step, results, {"cycle": step.cycle}, {}, found=found)


async def train(log: Log, run: RunRecord, first: int, count: int) -> int:
    """Run `count` pairs of a pass and an optimizer step, from `first` on. Return the next seq."""
    for seq in range(first, first + 2 * count, 2):
        await log.submit(run, seq)
        await log.submit(run, seq + 1, OpKind.OPTIM_STEP)
        found: dict[Any, HistoryEntry] = {(run.id, seq): PassEntry(LOSS * seq, 3.0, False),
                 (run.id, seq + 1): StepEntry(NORM * seq, RATE)}  # fmt: skip
        commit(log, await log.plan(), found)
    return first + 2 * count


async def test_a_pass_above_the_limit_of_drift_is_one_event_until_one_is_below(log: Log) -> None:
    hooks = Webhooks(log.connection, "api")
    run = await log.new_run()
    await hooks.set(run.tenant, "https://example.com", drift_above=0.25)
    for seq, gap in enumerate((0.2, 0.3, 0.4, 0.1, 0.5), 1):
        await log.submit(run, seq)
        drift = {"sampled": 10.0, "gap": 10 * gap, "gap_max": 1.0}
        found = {(run.id, seq): PassEntry(LOSS, 3.0, False, **drift)}
        commit(log, await log.plan(), found)
    stored = log.redis.hvals(redis_keys.events(run.tenant))
    events = [json.loads(row.split(b"|", 2)[2]) for row in stored]
    assert {event["type"] for event in events} == {"run.drift"}
    assert sorted(event["data"]["seq"] for event in events) == [2, 5]
    first = min(events, key=lambda event: event["data"]["seq"])["data"]
    assert first == {"training_run_id": run.id, "seq": 2, "rollout_gap": 0.3, "limit": 0.25}

    assert (await hooks.find(run.tenant)).drift_above == 0.25
    await hooks.set(run.tenant, "https://example.com")
    assert (await hooks.find(run.tenant)).drift_above is None


async def points(log: Log, run: RunRecord, after_step: int = -1) -> list[HistoryPoint]:
    return await read_history(log.connection, run.id, after_step)


def held(log: Log, tenant: str = "a") -> int:
    return int(log.redis.hget(redis_keys.history_points(TenantId(tenant)), "points") or 0)


async def test_a_point_has_the_exact_numbers_of_its_step(log: Log) -> None:
    run = await log.new_run()
    await train(log, run, 1, 2)
    first, second = await points(log, run)
    assert (first.kind, first.step, first.steps, first.seq, first.passes) == (
        "optim_step", 1, 1, 2, 1,
    )  # fmt: skip
    assert (first.loss_sum, first.weight_sum) == (LOSS, 3.0)
    assert (first.grad_norm, first.learning_rate) == (NORM, RATE)
    assert (second.loss_sum, second.grad_norm) == (LOSS * 3, NORM * 3)
    assert (first.tokens, first.run_tokens, second.run_tokens) == (7, 7, 14)
    assert await points(log, run, after_step=1) == [second]


async def test_drift_is_averaged_over_the_tokens_of_the_passes_with_a_policy_loss(log: Log) -> None:
    run = await log.new_run()
    entries: list[HistoryEntry] = [
        PassEntry(LOSS, 1.0, False),
        PassEntry(LOSS, 4.0, False, 4.0, LOSS, 0.25, 2.0, 4.0, 1.0),
        PassEntry(LOSS, 8.0, False, 12.0, 1.0, 0.125, 10.0, lagged=4.0, lag=6.0, lag_max=3.0),
        PassEntry(LOSS, 0.0, False, lagged=4.0, lag=-2.0, lag_max=-1.0),
        StepEntry(NORM, RATE),
        PassEntry(LOSS, 1.0, False),
        StepEntry(NORM, RATE),
    ]
    for seq, entry in enumerate(entries, 1):
        kind = OpKind.OPTIM_STEP if isinstance(entry, StepEntry) else OpKind.FORWARD_BACKWARD
        await log.submit(run, seq, kind)
        commit(log, await log.plan(), {(run.id, seq): entry})
    with_drift, without = await points(log, run)
    assert (with_drift.rollout_gap, with_drift.rollout_gap_max) == ((LOSS + 1.0) / 16, 0.25)
    assert (with_drift.effective_sample_size, with_drift.clip_fraction) == (0.75, 0.25)
    assert (with_drift.policy_lag, with_drift.policy_lag_max) == (0.5, 3.0)
    assert (with_drift.passes, without.rollout_gap, without.clip_fraction) == (4, None, None)
    assert without.policy_lag is None


async def test_passes_of_several_cycles_are_summed_in_their_order(log: Log) -> None:
    run = await log.new_run()
    losses = [1e16, 1.0, -1e16, LOSS]
    for seq, loss in enumerate(losses, 1):
        await log.submit(run, seq)
        commit(log, await log.plan(), {(run.id, seq): PassEntry(loss, 0.5, False)})
    assert await points(log, run) == []
    await log.submit(run, 5, OpKind.OPTIM_STEP)
    commit(log, await log.plan(), {(run.id, 5): StepEntry(NORM, RATE)})
    [point] = await points(log, run)
    assert point.loss_sum == ((losses[0] + losses[1]) + losses[2]) + losses[3]
    assert (point.passes, point.weight_sum, point.tokens) == (4, 2.0, 28)


async def test_forwards_between_two_steps_are_one_evaluation(log: Log) -> None:
    run = await log.new_run()
    seq = await train(log, run, 1, 1)
    for at in (seq, seq + 1):
        await log.submit(run, at, OpKind.FORWARD)
        commit(log, await log.plan(), {(run.id, at): PassEntry(LOSS, 2.0, True)})
    await train(log, run, seq + 2, 1)
    await log.submit(run, seq + 4, OpKind.FORWARD)
    commit(log, await log.plan(), {(run.id, seq + 4): PassEntry(1.0, 2.0, True)})
    found = await points(log, run)
    assert [(point.kind, point.step, point.passes) for point in found] == [
        ("optim_step", 1, 1), ("forward", 1, 2), ("optim_step", 2, 1), ("forward", 2, 1),
    ]  # fmt: skip
    evaluation = found[1]
    assert (evaluation.loss_sum, evaluation.weight_sum, evaluation.seq) == (LOSS + LOSS, 4.0, 4)
    assert (evaluation.grad_norm, evaluation.learning_rate) == (None, None)
    assert found[2].tokens == 7


async def test_a_repeated_op_writes_no_point_twice(log: Log) -> None:
    run = await log.new_run()
    for seq, kind in ((1, OpKind.FORWARD_BACKWARD), (2, OpKind.OPTIM_STEP)):
        await log.submit(run, seq, kind)
    step = await log.plan()
    found: dict[Any, HistoryEntry] = {
        (run.id, 1): PassEntry(LOSS, 1.0, False), (run.id, 2): StepEntry(NORM, RATE),
    }  # fmt: skip
    commit(log, step, found)
    before = log.everything()
    commit(log, step, found)
    assert log.everything() == before

    await log.submit(run, 3)
    await log.submit(run, 4, OpKind.OPTIM_STEP)
    later = await log.plan()
    both = replace(later, ops=step.ops + later.ops)
    log.redis.hset(redis_keys.open_steps(POOL, WORKER), later.cycle, encode(both))
    more: dict[Any, HistoryEntry] = {
        (run.id, 3): PassEntry(2.0, 1.0, False), (run.id, 4): StepEntry(NORM, RATE),
    }  # fmt: skip
    commit(log, both, {**found, **more})
    assert [(point.step, point.loss_sum) for point in await points(log, run)] == [
        (1, LOSS), (2, 2.0),
    ]  # fmt: skip


async def test_a_load_excludes_pending_passes(log: Log) -> None:
    run = await log.new_run()
    await log.submit(run, 1)
    commit(log, await log.plan(), {(run.id, 1): PassEntry(LOSS, 1.0, False)})
    await log.submit(run, 2, OpKind.LOAD)
    commit(log, await log.plan(), {})
    await train(log, run, 3, 1)
    [point] = await points(log, run)
    assert (point.loss_sum, point.passes) == (LOSS * 3, 1)


async def test_metrics_are_exact_and_an_evaluation_without_all_its_forwards_has_no_value(log: Log) -> None:
    run = await log.new_run()
    await train(log, run, 1, 1)
    entries: list[HistoryEntry] = [
        PassEntry(5.0, 1.0, True),  # of no evaluation
        MetricsEntry({}, "eval/nll"),
        PassEntry(LOSS, 2.0, True), PassEntry(LOSS, 1.0, True),
        MetricsEntry({"reward": LOSS, "other": NORM}, "eval/nll", 2),
        MetricsEntry({}, "lost/nll"),
        PassEntry(LOSS, 1.0, True),
        MetricsEntry({}, "lost/nll", 2),
    ]  # fmt: skip
    for seq, entry in enumerate(entries, 3):
        kind = OpKind.METRICS if isinstance(entry, MetricsEntry) else OpKind.FORWARD
        await log.submit(run, seq, kind)
        commit(log, await log.plan(), {(run.id, seq): entry})
    found = await read_metrics(log.connection, run.id)
    assert {name: [(p.step, p.seq, p.value) for p in own] for name, own in found.items()} == {
        "eval/nll": [(1, 7, (LOSS + LOSS) / 3.0)], "reward": [(1, 7, LOSS)], "other": [(1, 7, NORM)],
    }  # fmt: skip
    evaluations = [point for point in await points(log, run) if point.kind == "forward"]
    assert [(point.passes, point.loss_sum) for point in evaluations] == [
        (1, 5.0), (2, LOSS + LOSS), (1, LOSS),
    ]  # fmt: skip
    assert held(log) == 1 + 3 + 3


#: Writes the points of steps 1…n one by one, as commits do, and counts the added points.
WRITE_STEPS = (
    (SCRIPTS / "lib/history.lua").read_text()
    + """
local history, more = parse_history(false), 0
for n = 1, tonumber(ARGV[1]) do
  more = more + record_entry(history, KEYS[1], n, { norm = n / 3, rate = 1 }, 0, n)
end
return more
"""
)


@pytest.mark.parametrize("count", [1, 2, 1_024, 1_025, 1_026, 2_047, 2_048, 4_100])
def test_many_steps_are_thinned_to_an_even_grid_with_both_ends(log: Log, count: int) -> None:
    more = log.redis.eval(WRITE_STEPS, 1, "run", count)
    kept = read_points("optim_step", log.redis.lrange(redis_keys.steps(RunId("run")), 0, -1))
    stride = next(2**k for k in range(12) if count - 1 <= 1_023 * 2**k)
    assert len(kept) == more <= 1_024
    assert [point.step for point in kept] == sorted({*range(1, count + 1, stride), count})
    assert sum(point.steps for point in kept) == count
    assert all(point.grad_norm == point.seq / 3 for point in kept)
    assert log.redis.memory_usage(redis_keys.steps(RunId("run")), samples=0) < 90_000


async def test_a_run_that_goes_back_to_a_checkpoint_loses_later_points(samples: Samples) -> None:
    log = samples.log
    run = await log.new_run()
    seq = await train(log, run, 1, 3)
    checkpoint = await samples.checkpoint(run, seq, "x", kind="weights")
    after = await train(log, run, seq + 1, 4)
    await log.submit(run, after, OpKind.METRICS)
    commit(log, await log.plan(), {(run.id, after): MetricsEntry({"reward": LOSS})})
    after += 1
    await log.submit(run, after, OpKind.FORWARD)
    commit(log, await log.plan(), {(run.id, after): PassEntry(LOSS, 1.0, True)})
    await log.submit(run, after + 1)
    commit(log, await log.plan(), {(run.id, after + 1): PassEntry(LOSS, 1.0, False)})
    before = await points(log, run)
    assert (len(before), held(log)) == (8, 9)
    log.execution.roll_back(checkpoint, "f", "sha")
    assert await points(log, run) == before[:3]
    assert (held(log), await read_metrics(log.connection, run.id)) == (3, {})
    await train(log, run, after + 2, 1)
    newest = (await points(log, run))[-1]
    assert (newest.step, newest.passes, newest.run_tokens) == (4, 1, 28)


async def test_over_the_quota_the_least_recently_extended_history_is_removed(log: Log) -> None:
    old, other = await log.new_run("a"), await log.new_run("a", "second")
    elsewhere = await log.new_run("b")
    log.redis.hset(redis_keys.history_points(TenantId("a")), "quota", 5)
    await train(log, elsewhere, 1, 4)
    await train(log, old, 1, 3)
    seq = await train(log, other, 1, 2)
    assert held(log) == 5
    await train(log, other, seq, 1)
    assert (await points(log, old), held(log)) == ([], 3)
    assert [point.step for point in await points(log, other)] == [1, 2, 3]
    assert len(await points(log, elsewhere)) == 4
    await train(log, old, 7, 1)
    [point] = await points(log, old)
    assert (point.step, point.steps) == (4, 4)
