"""Recordings of the last cycles on disk, one file each. A disk error never stops training."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from cotrain_workers.recorder.file import RecordingUnreadable, read_cycle, read_facts, write_cycle
from tests.support.flight import A, B, Flight, a_load, a_pass, a_save, a_step, create, whole_story
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
    assert list(cycle.found.by_op) == [(A, 4), (B, 0)]
    assert list(cycle.found.by_run) == [A, B]


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
        assert [each.digest for each in again.found.by_op.values()] == [
            each.digest for each in cycle.found.by_op.values()
        ]


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
