"""Replay of a recorded cycle: the same bits, and a report of every difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.recorder.file import RecordedCycle, only_run, read_cycle
from cotrain_workers.recorder.replay import (
    OTHER_NUMERICS,
    Compared,
    compared,
    engine_for,
    restore_before,
    run_again,
    tolerance_of,
)
from tests.support.flight import A, B, C, Flight, a_pass, a_step, create, whole_story
from tests.support.tiny_models import build_tiny
from tests.support.training import NewEngine


@pytest.fixture
def flight(new_engine: NewEngine, tmp_path: Path) -> Flight:
    return Flight(new_engine(), tmp_path)


@pytest.fixture
def second_cycle(flight: Flight) -> RecordedCycle:
    """Return a cycle of two existing runs."""
    flight.cycle(create(A, rank=4), create(B, rank=2), a_pass(A, 1), a_step(A, 2), a_pass(B, 1))
    flight.cycle(a_pass(A, 3), a_step(A, 4), a_pass(B, 2), a_step(B, 3))
    return read_cycle(flight.files[1])


def replayed(
    cycle: RecordedCycle, tolerance: float = 0.0, base_model: str | None = None, **changes: Any
) -> list[Compared]:
    engine = engine_for(cycle.facts, base_model, device="cpu")
    restore_before(engine, cycle)
    return list(compared(cycle, run_again(engine, cycle, **changes), tolerance))


def verdicts(rows: list[Compared]) -> dict[tuple[str, int | None], str]:
    return {(row.run, row.seq): row.verdict for row in rows}


def diverged(rows: list[Compared]) -> list[tuple[str, int | None]]:
    return [(row.run, row.seq) for row in rows if row.verdict == "DIVERGED"]


def with_state(cycle: RecordedCycle, run: str, **changes: Any) -> RecordedCycle:
    before = dict(cycle.before)
    before[RunId(run)] = replace(before[RunId(run)], **changes)
    return replace(cycle, before=before)


def one_bit_off(state: AdapterState) -> torch.Tensor:
    weights = state.weights.clone()
    weights.view(torch.int32)[0] ^= 1
    return weights


def test_every_recorded_cycle_is_replayed_with_the_same_bits(flight: Flight) -> None:
    whole_story(flight)
    cycles = [read_cycle(path) for path in flight.files]
    rows = [row for cycle in cycles for row in replayed(cycle)]
    assert {row.verdict for row in rows} == {"equal", "left out"}
    left_out = [(row.run, row.seq) for row in rows if row.verdict == "left out"]
    assert left_out == [(C, 5), (B, 7)]  # a missing checkpoint; a crash
    assert len(rows) == sum(len(c.facts.step.ops) + len(c.found.by_run) for c in cycles if c.found)


def test_a_changed_bit_of_a_state_is_reported_for_its_run_only(second_cycle: RecordedCycle) -> None:
    weights = one_bit_off(second_cycle.before[RunId(A)])
    rows = replayed(with_state(second_cycle, A, weights=weights))
    assert (A, None) in diverged(rows)
    assert verdicts(rows)[B, 3] == verdicts(rows)[B, None] == "equal"
    (state_after,) = [row for row in rows if (row.run, row.seq) == (A, None)]
    assert state_after.details.startswith("weights: ")


def test_a_changed_body_is_reported_by_run_and_seq(second_cycle: RecordedCycle) -> None:
    _, _, _, other = a_pass(B, 77)
    bodies = [*second_cycle.bodies[:2], other, *second_cycle.bodies[3:]]
    rows = replayed(replace(second_cycle, bodies=bodies))
    assert diverged(rows) == [(B, 2), (B, 3), (B, None)]
    details = {row.seq: row.details for row in rows if row.run == B}
    assert details[2].startswith("log-probs: ")
    assert details[3].startswith("gradient norm: ")


def test_another_base_model_is_reported_for_every_run(second_cycle: RecordedCycle, tmp_path: Path) -> None:
    other = build_tiny("qwen3", tmp_path / "other", seed=1)
    rows = replayed(second_cycle, base_model=str(other))
    assert diverged(rows) == [(row.run, row.seq) for row in rows]


def test_a_base_model_of_another_shape_is_refused(second_cycle: RecordedCycle, tmp_path: Path) -> None:
    other = build_tiny("qwen3", tmp_path / "other", hidden=32)
    with pytest.raises(ValueError, match="values"):
        replayed(second_cycle, base_model=str(other))


def test_results_of_other_numerics_may_differ_within_a_tolerance(second_cycle: RecordedCycle) -> None:
    ours = second_cycle.facts.numerics
    theirs = replace(ours, hardware="another")
    assert tolerance_of(ours, ours) == 0.0
    assert tolerance_of(theirs, ours) == OTHER_NUMERICS
    weights = second_cycle.before[RunId(A)].weights
    a_little = with_state(second_cycle, A, weights=weights * (1 + 1e-6))
    rows = replayed(a_little, tolerance=OTHER_NUMERICS)
    assert verdicts(rows)[A, None] == "close"
    assert diverged(rows) == []
    much = with_state(second_cycle, A, weights=weights * 1.5)
    assert (A, 3) in diverged(replayed(much, tolerance=OTHER_NUMERICS))


def test_the_base_model_is_loaded_with_the_settings_of_the_recording(new_engine: NewEngine, tmp_path: Path) -> None:
    flight = Flight(new_engine(micro_batch_tokens=64, head_chunk_rows=16), tmp_path)
    flight.cycle(create(A, rank=4))
    facts = read_cycle(flight.files[0]).facts
    torch.set_num_threads(2)
    try:
        assert engine_for(facts, base_model=None, device=None).facts.numerics == facts.numerics
    finally:
        torch.set_num_threads(1)


def test_a_cycle_that_crashed_its_process_is_recorded_and_replayed(flight: Flight) -> None:
    flight.cycle(create(A, rank=4))
    flight.begin(a_pass(A, 1), a_step(A, 2))
    cycle = read_cycle(flight.files[1])
    assert cycle.found is None
    rows = replayed(cycle)
    assert verdicts(rows) == {(A, 1): "new", (A, 2): "new", (A, None): "new"}


def test_a_crashed_op_is_replayed_on_request(flight: Flight) -> None:
    flight.cycle(create(A, rank=4), a_pass(A, 1), crashed=[(A, 1)])
    cycle = read_cycle(flight.files[0])
    assert verdicts(replayed(cycle))[A, 1] == "left out"
    assert verdicts(replayed(cycle, everything=True))[A, 1] == "new"


def test_one_run_of_a_cycle_is_replayed_alone(flight: Flight) -> None:
    whole_story(flight)
    alone = only_run(read_cycle(flight.files[2]), RunId(B))
    assert {op.run for op in alone.facts.step.ops} == set(alone.before) == {B}
    assert set(alone.read.weights) == {f"{A}:4"}  # the reference of its reverse KL
    mixed_by_another = only_run(read_cycle(flight.files[4]), RunId(B))
    assert mixed_by_another.read.weights == {}
    assert verdicts(replayed(alone)) == {(B, 4): "equal", (B, 5): "equal", (B, None): "equal"}


def test_a_replay_shows_the_digests_of_the_cycle_record(second_cycle: RecordedCycle) -> None:
    assert second_cycle.found
    shown = {(row.run, row.seq): row.digest for row in replayed(second_cycle)}
    for op_id, fingerprint in second_cycle.found.by_op.items():
        assert shown[op_id] == fingerprint.digest


def test_a_pass_over_several_cycles_is_replayed_in_its_last_one(new_engine: NewEngine, tmp_path: Path) -> None:
    """Ops that waited for it are replayed too. In earlier cycles it has changed no state."""
    flight = Flight(new_engine(micro_batch_tokens=8), tmp_path)
    flight.cycle(create(A, rank=4), create(B, rank=2))
    ops = a_pass(A, 1), a_step(A, 2)
    flight.cycle(*ops, a_pass(B, 1), allowances={(A, 1): 1})
    flight.cycle(*ops, allowances={(A, 1): 1})
    flight.cycle(*ops)
    _, first, second, last = (read_cycle(path) for path in flight.files)
    assert verdicts(replayed(first, everything=True)) == {
        (A, 1): "left out",
        (A, 2): "left out",
        (B, 1): "equal",
        (A, None): "equal",
        (B, None): "equal",
    }
    assert verdicts(replayed(second))[A, 1] == "left out"
    assert verdicts(replayed(last)) == {(A, 1): "equal", (A, 2): "equal", (A, None): "equal"}
