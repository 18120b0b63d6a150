"""Snapshot files, and the policy for snapshots and evictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.recovery.snapshot_file import (
    LOG_ENTRIES,
    ReplayBacklog,
    ReplayCost,
    Snapshot,
    SnapshotPolicy,
    SnapshotUnreadable,
    orphans,
    read_snapshot,
    remove_snapshots,
    run_folder,
    write_snapshot,
)
from tests.support.full_table import no_descriptor

RUN = "session:train:0"


def a_state(*, dtype: torch.dtype = torch.float32, grads_pending: bool = True) -> AdapterState:
    generator = torch.Generator().manual_seed(0)
    weights, grads, m, v = (torch.randn(48, generator=generator, dtype=dtype) for _ in range(4))
    weights[0], grads[0] = float("-inf"), float("nan")  # special bit patterns
    spec = AdapterSpec(rank=3, seed=5, train_mlp=False)
    return AdapterState(spec, weights, grads, m, v, step=12, grads_pending=grads_pending)


def written(folder: Path, state: AdapterState, *, seq: int = 7, writer: str = "w0-1") -> Snapshot:
    return write_snapshot(Folder(folder), RUN, seq, writer, "numerics", state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grads_pending", [True, False])
def test_a_state_is_unchanged_by_writing_and_reading(tmp_path: Path, dtype: torch.dtype, grads_pending: bool) -> None:
    state = a_state(dtype=dtype, grads_pending=grads_pending)
    snapshot = written(tmp_path, state)
    read = read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, RUN, 7)
    assert read.digest() == state.digest()
    assert (read.spec, read.step, read.grads_pending) == (state.spec, 12, grads_pending)


def test_a_snapshot_has_the_stated_size_and_place(tmp_path: Path) -> None:
    snapshot = written(tmp_path, a_state())
    assert (tmp_path / snapshot.file).stat().st_size == snapshot.size
    assert (tmp_path / snapshot.file).parent.stat().st_mode & 0o777 == 0o700
    assert RUN not in snapshot.file  # the name of a run comes from a client, and a path must not


def test_a_replaced_worker_never_overwrites_a_file_of_its_successor(tmp_path: Path) -> None:
    writers = ("w0-1", "w0-2", "w1-1")
    assert len({written(tmp_path, a_state(), writer=writer).file for writer in writers}) == 3


@pytest.mark.parametrize("at", [0, 5, 100, -1])
def test_a_changed_byte_is_detected(tmp_path: Path, at: int) -> None:
    snapshot = written(tmp_path, a_state())
    content = bytearray((tmp_path / snapshot.file).read_bytes())
    content[at] ^= 1
    (tmp_path / snapshot.file).write_bytes(bytes(content))
    with pytest.raises(SnapshotUnreadable, match="does not match its digest"):
        read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, RUN, 7)


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnreadable, match="cannot be read"):
        read_snapshot(Folder(tmp_path), "x/7-1.safetensors", "0" * 64, RUN, 7)


@pytest.mark.parametrize(("run", "seq"), [("other", 7), (RUN, 8)])
def test_a_snapshot_of_another_run_or_seq_is_refused(tmp_path: Path, run: str, seq: int) -> None:
    snapshot = written(tmp_path, a_state())
    with pytest.raises(SnapshotUnreadable, match="is not of run"):
        read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, run, seq)


@pytest.mark.usefixtures("lost_disk")
def test_an_interrupted_write_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        written(tmp_path, a_state())
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_removal_keeps_the_given_files_and_those_of_other_runs(tmp_path: Path) -> None:
    old, new = written(tmp_path, a_state(), seq=1), written(tmp_path, a_state(), seq=2)
    other = write_snapshot(Folder(tmp_path), "other", 1, "w0-1", "numerics", a_state())
    (tmp_path / new.file).with_name(".2-w0-1.safetensors.0f").write_bytes(b"half")
    remove_snapshots(Folder(tmp_path), RUN, frozenset({new.file}))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert left == sorted([new.file, other.file])
    assert old.file not in left
    remove_snapshots(Folder(tmp_path), RUN)
    remove_snapshots(Folder(tmp_path), RUN)  # repeating it has no effect
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == [other.file]


def test_equal_digests_mean_equal_states() -> None:
    state = a_state()
    assert state.digest() == replace(state).digest()
    changed = state.weights.clone()
    changed[-1] = torch.nextafter(changed[-1], torch.tensor(9e9))
    others = [
        replace(state, step=13),
        replace(state, grads_pending=False),
        replace(state, weights=changed),
        replace(state, m=state.v, v=state.m),
        replace(state, spec=replace(state.spec, seed=6)),
    ]
    assert len({state.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_only_files_from_which_no_log_continues_are_orphans(tmp_path: Path) -> None:
    kept, orphan = (written(tmp_path, a_state(), seq=seq).file for seq in (1, 2))
    damaged, half = ((tmp_path / orphan).with_name(name) for name in ("3-x-1.x", ".4-x-1.safetensors.0f"))
    for path in (damaged, half):
        path.write_bytes(b"torn")

    found = orphans(Folder(tmp_path), lambda run: frozenset({kept} if run == RUN else ()), lambda *_: False)

    assert sorted(found) == sorted([orphan, str(half.relative_to(tmp_path))])


def test_a_file_of_a_running_writer_is_no_orphan(tmp_path: Path) -> None:
    path = tmp_path / written(tmp_path, a_state(), seq=1).file
    half = path.with_name(".2-gpu-1.example.com-7.safetensors.0f")
    half.write_bytes(b"torn")
    asked = []

    def is_at_work(folder: str, writer: str) -> bool:
        asked.append((folder, writer))
        return writer == "gpu-1.example.com-7"

    found = orphans(Folder(tmp_path), lambda _: frozenset(), is_at_work)
    assert list(found) == [str(path.relative_to(tmp_path))]
    assert (run_folder(RUN), "gpu-1.example.com-7") in asked


def test_a_process_without_descriptors_does_not_report_a_lost_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = written(tmp_path, a_state())
    monkeypatch.setattr("pathlib.Path.open", no_descriptor)
    with pytest.raises(OSError, match="Too many"):
        read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, RUN, 7)


NOW = 1_000.0
POLICY = SnapshotPolicy(replay_s=30.0, ops=10, bytes=1_000, idle_s=60.0, evict_idle_s=120.0)


def test_committed_ops_are_summed() -> None:
    backlog = ReplayBacklog(seq=3)
    backlog.add(4, size=100, compute_s=1.5, replay_s=3.0, now=NOW)
    backlog.add(5, size=50, compute_s=0.5, replay_s=1.0, now=NOW + 1)
    backlog.pass_by(6, now=NOW + 2)
    assert backlog == ReplayBacklog(6, ops=2, bytes=150, compute_s=2.0, replay_s=4.0, used_at=NOW + 2, entries=3)


@pytest.mark.parametrize(
    ("backlog", "is_due"),
    [
        (ReplayBacklog(5, ops=1, used_at=NOW), False),
        (ReplayBacklog(5, ops=9, bytes=999, compute_s=99.0, replay_s=29.9, used_at=NOW - 59), False),
        (ReplayBacklog(5, ops=10, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, bytes=1_000, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW, copy_s=7.5), True),
        (ReplayBacklog(5, ops=1, replay_s=30.0, used_at=NOW, copy_s=7.6), False),
        (ReplayBacklog(5, ops=1, replay_s=31.0, used_at=NOW, copy_s=7.6), True),
        (ReplayBacklog(5, ops=1, is_due=True, used_at=NOW), True),
        (ReplayBacklog(5, ops=0, is_due=True, used_at=NOW), False),
        (ReplayBacklog(5, ops=1, used_at=NOW - 60), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 9_999), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES - 1, used_at=NOW), False),
        (ReplayBacklog(5, ops=0, entries=LOG_ENTRIES, used_at=NOW), True),
    ],
)
def test_a_snapshot_is_due_if_its_replay_is_costly_or_the_run_is_idle(backlog: ReplayBacklog, is_due: bool) -> None:
    assert POLICY.needs_snapshot(backlog, NOW) == is_due


@pytest.mark.parametrize(
    ("backlog", "may"),
    [
        (ReplayBacklog(5, ops=0, used_at=NOW - 120), True),
        (ReplayBacklog(5, ops=0, used_at=NOW - 119), False),
        (ReplayBacklog(5, ops=1, used_at=NOW - 9_999), False),
    ],
)
def test_a_run_is_evicted_after_idling_long_without_a_replay_backlog(backlog: ReplayBacklog, may: bool) -> None:
    assert POLICY.may_evict(backlog, NOW) == may


def test_a_run_with_a_replay_backlog_is_copied_before_its_eviction() -> None:
    assert POLICY.idle_s < POLICY.evict_idle_s
    backlog = ReplayBacklog(5, ops=1, used_at=NOW)
    later = NOW + POLICY.evict_idle_s
    assert POLICY.needs_snapshot(backlog, later)
    assert not POLICY.may_evict(backlog, later)


def test_a_small_pass_among_many_has_the_cost_of_a_pass_alone() -> None:
    cost = ReplayCost(pass_s=0.08, step_s=0.02)
    assert cost.alone_s(0.03, 1 / 64, is_pass=True) == pytest.approx(0.03 + 0.08 * 63 / 64)
    assert cost.alone_s(0.03, 1 / 64, is_pass=False) == pytest.approx(0.03 + 0.02 * 63 / 64)


def test_a_pass_alone_in_its_cycle_has_the_same_cost_again() -> None:
    assert ReplayCost(pass_s=0.08).alone_s(1.3, 1.0, is_pass=True) == 1.3
    # It took several cycles, and more than the last one.
    assert ReplayCost(pass_s=0.08).alone_s(5.0, 4.0, is_pass=True) == 5.0


def some_runs(*replay_s: float, **more: float) -> dict[RunId, ReplayBacklog]:
    return {
        RunId(f"r{at}"): ReplayBacklog(5, ops=1, replay_s=each, used_at=NOW, **more)  # type: ignore[arg-type]
        for at, each in enumerate(replay_s)
    }


def test_the_costliest_runs_are_copied_until_the_total_is_in_bounds() -> None:
    assert POLICY.runs_due(some_runs(*[0.5] * 44), NOW) == []
    assert POLICY.runs_due(some_runs(*[0.5] * 45), NOW) == ["r0"]
    assert POLICY.runs_due(some_runs(1.0, 9.0, 6.0, 9.5, 8.0), NOW) == ["r3", "r1"]


def test_a_run_with_a_slow_copy_is_not_copied_for_the_others() -> None:
    quick = ReplayBacklog(5, ops=1, replay_s=5.0, used_at=NOW)
    runs = some_runs(9.0, 9.1, copy_s=2.3) | {RunId("quick"): quick}
    assert POLICY.runs_due(runs, NOW) == ["quick"]


def test_an_idle_run_is_copied_at_any_total_cost() -> None:
    runs = some_runs(1.0) | {RunId("rests"): ReplayBacklog(5, ops=1, used_at=NOW - 60)}
    assert POLICY.runs_due(runs, NOW) == ["rests"]
