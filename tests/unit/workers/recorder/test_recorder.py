"""Recordings of the last cycles on disk, one file each, and their replay. A disk error never stops training."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.recorder.file import (
    RecordedCycle,
    RecordingUnreadable,
    only_run,
    read_cycle,
    read_facts,
    write_cycle,
)
from cotrain_workers.recorder.recorder import (
    OTHER_NUMERICS,
    Compared,
    compared,
    engine_for,
    restore_before,
    run_again,
    tolerance_of,
)
from tests.support.flight import A, B, C, Flight, a_load, a_pass, a_save, a_step, create, whole_story
from tests.support.tiny_models import build_tiny
from tests.support.training import NewEngine


@pytest.fixture
def flight(new_engine: NewEngine, tmp_path: Path) -> Flight:
    return Flight(new_engine(), tmp_path / "flight")


def test_a_file_holds_plan_bodies_states_and_the_weights_read(flight: Flight) -> None:
    flight.cycle(create(A, rank=4), a_pass(A, 1), a_step(A, 2), a_save(A, 3))
    before = flight.engine.adapters.state(A)
    load = a_load(A, 4, [f"{A}:3"], optimizer=True)
    flight.cycle(load, create(B, rank=2))
    cycle = read_cycle(flight.files[1])
    assert (cycle.facts.step, cycle.facts.base_model) == (flight.step, "tiny")
    assert cycle.facts.numerics == flight.engine.facts.numerics
    assert cycle.bodies == [load[3], create(B, rank=2)[3]]
    assert {run: state.digest() for run, state in cycle.before.items()} == {A: before.digest()}
    saved = flight.memory.saves[f"{A}:3"]
    assert cycle.read.weights[f"{A}:3"].flat.equal(saved.weights.flat)
    read, moments = cycle.read.optimizers[f"{A}:3"], saved.optimizer
    assert read
    assert moments
    assert (read.m.equal(moments.m), read.v.equal(moments.v), read.step) == (True, True, 1)
    assert cycle.found
    assert list(cycle.found) == [(A, 4), (B, 0), (A, None), (B, None)]


def test_a_recording_read_and_written_again_is_unchanged(flight: Flight, tmp_path: Path) -> None:
    whole_story(flight)
    copy = tmp_path / "copy.zip"
    for path in flight.files:
        cycle = read_cycle(path)
        write_cycle(copy, cycle)
        with zipfile.ZipFile(path) as one, zipfile.ZipFile(copy) as two:
            assert one.namelist() == two.namelist()
            # safetensors writes its metadata in any order
            same = [name for name in one.namelist() if not name.endswith(".safetensors")]
            assert [one.read(name) for name in same] == [two.read(name) for name in same]
        again = read_cycle(copy)
        assert [state.digest() for state in again.before.values()] == [
            state.digest() for state in cycle.before.values()
        ]
        assert again.found
        assert cycle.found
        assert [each.digest for each in again.found.values()] == [each.digest for each in cycle.found.values()]


def test_only_its_owner_can_read_a_file(flight: Flight) -> None:
    flight.cycle(create(A, rank=4))
    assert flight.files[0].stat().st_mode & 0o777 == 0o600


def test_the_oldest_cycles_are_removed(new_engine: NewEngine, tmp_path: Path) -> None:
    flight = Flight(new_engine(), tmp_path, kept=2)
    flight.cycle(create(A, rank=4))
    for seq in (1, 2, 3):
        flight.cycle(a_pass(A, seq))
    assert [read_facts(path).step.cycle for path in flight.files] == [3, 4]


def test_nothing_is_recorded_by_default(new_engine: NewEngine, tmp_path: Path) -> None:
    flight = Flight(new_engine(), tmp_path, kept=0)
    flight.cycle(create(A, rank=4))
    assert flight.files == []


def test_a_repeated_cycle_keeps_the_recording_of_the_crashed_one(flight: Flight, new_engine: NewEngine) -> None:
    flight.begin(create(A, rank=4))
    successor = Flight(new_engine(), flight.folder, epoch=2)
    successor.cycle(create(A, rank=4))
    assert [read_cycle(path).found is None for path in flight.files] == [True, False]


def test_a_full_disk_prevents_only_the_recording(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cotrain_workers.recorder.recorder.write_inputs", full)
    flight.cycle(create(A, rank=4))
    assert flight.files == []
    monkeypatch.undo()
    monkeypatch.setattr("cotrain_workers.recorder.recorder.add_findings", full)
    flight.cycle(a_pass(A, 1))
    assert read_cycle(flight.files[0]).found is None
    assert A in flight.engine.adapters


@pytest.mark.parametrize("member", ["bodies/0", "before/0.safetensors", "outcome.json"])
def test_a_flipped_byte_is_detected_before_anything_runs(flight: Flight, member: str) -> None:
    flight.cycle(create(A, rank=4))
    flight.cycle(a_pass(A, 1))
    path = flight.files[1]
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo(member).header_offset + 30 + len(member) + 8
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordingUnreadable, match=member):
        read_cycle(path)


def test_a_truncated_file_is_reported_as_unreadable(flight: Flight) -> None:
    flight.cycle(create(A, rank=4))
    path = flight.files[0]
    path.write_bytes(path.read_bytes()[:-40])
    for read in (read_cycle, read_facts):
        with pytest.raises(RecordingUnreadable, match="cannot be read"):
            read(path)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(8, 0x01), (10, 99), (10, 8), (10, 14)],
    ids=["encrypted", "unknown compression", "no deflate", "no lzma"],
)
def test_a_malicious_file_is_reported_as_unreadable(tmp_path: Path, offset: int, value: int) -> None:
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cycle.json", "{}" * 20)
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + offset] = value  # in the directory of the archive …
    content[offset - 2] = value  # … and before the member
    path.write_bytes(content)
    for read in (read_cycle, read_facts):
        with pytest.raises(RecordingUnreadable, match="cannot be read"):
            read(path)


@pytest.mark.parametrize("facts", ["[" * 100_000, "[]", "1", '{"format": "cotrain-cycle-1"}'])
def test_invalid_facts_are_reported_as_unreadable(tmp_path: Path, facts: str) -> None:
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cycle.json", facts)
    for read in (read_cycle, read_facts):
        with pytest.raises(RecordingUnreadable, match="cannot be read"):
            read(path)


def test_a_file_of_another_format_is_refused_by_name(flight: Flight, tmp_path: Path) -> None:
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("cycle.json", '{"format": "cotrain-cycle-9"}')
    with pytest.raises(RecordingUnreadable, match=r"cotrain-cycle-9.*cotrain-cycle-1"):
        read_cycle(other)


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
    assert len(rows) == sum(
        len(c.facts.step.ops) + len(c.before.keys() | {op.run for op in c.facts.step.ops}) for c in cycles
    )


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
    for at, fingerprint in second_cycle.found.items():
        assert shown[at] == fingerprint.digest


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


FOLDER = Path(__file__).parents[3] / "data" / "recorded"
FILES = sorted(FOLDER.glob("*.zip"))


def test_there_are_recorded_cycles() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_cycle_has_the_same_results(path: Path) -> None:
    """The bits are equal with the numerics of the recording; otherwise results are within the tolerance of a recovery."""
    cycle = read_cycle(path)
    engine = engine_for(cycle.facts, str(FOLDER / "model"), device="cpu")
    restore_before(engine, cycle)
    again = run_again(engine, cycle)
    tolerance = tolerance_of(cycle.facts.numerics, engine.facts.numerics)
    rows = list(compared(cycle, again, tolerance))
    assert len(rows) >= 6
    assert [row for row in rows if row.verdict == "DIVERGED"] == []
