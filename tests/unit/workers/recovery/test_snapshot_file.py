"""Snapshot files, and the policy for snapshots and evictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.recovery.orphan_sweep import orphans
from cotrain_workers.recovery.snapshot_file import (
    Snapshot,
    SnapshotUnreadable,
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
