"""Files of optimizer states and of recovery copies: exact, whole or missing, and checked when read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.files import base_model_of
from cotrain_workers.checkpoints.state_files import (
    OptimizerUnreadable,
    Snapshot,
    SnapshotUnreadable,
    optimizer_key,
    read_optimizer,
    read_snapshot,
    remove_snapshots,
    run_folder,
    write_optimizer,
    write_snapshot,
)
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import HostOptimizer
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from cotrain_workers.recovery.orphan_sweep import orphans
from tests.support.full_table import no_descriptor

SPEC = AdapterSpec(rank=2, seed=3, train_mlp=False)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


def a_state(*, step: int = 12) -> HostOptimizer:
    generator = torch.Generator().manual_seed(0)
    m, v = (torch.randn(layout_of(SPEC).size, generator=generator) for _ in range(2))
    m[0], v[0] = float("-inf"), float("nan")  # special bit patterns
    return HostOptimizer(SPEC, m, v, step)


def test_a_state_is_unchanged_by_writing_and_reading(tmp_path: Path) -> None:
    state = a_state()
    written = write_optimizer(Folder(tmp_path), state, "m")
    read = read_optimizer(Folder(tmp_path), written.digest, layout_of)
    assert (read.spec, read.step) == (state.spec, 12)
    for ours, theirs in ((read.m, state.m), (read.v, state.v)):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    path = tmp_path / optimizer_key(written.digest)
    assert path.stat().st_size == written.size
    assert base_model_of(Folder(tmp_path), optimizer_key(written.digest)) == "m"


def test_equal_states_share_a_file_and_different_ones_do_not(tmp_path: Path) -> None:
    state = a_state()
    others = [replace(state, step=13), replace(state, m=state.v, v=state.m), replace(state, spec=replace(SPEC, seed=4))]
    digests = [write_optimizer(Folder(tmp_path), each, "m").digest for each in (state, a_state(), *others)]
    digests.append(write_optimizer(Folder(tmp_path), state, "another").digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5 == len(list(tmp_path.glob("??/*")))


def test_an_existing_file_is_touched_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    written = write_optimizer(Folder(tmp_path), a_state(), "m")
    path = tmp_path / optimizer_key(written.digest)
    os.utime(path, (0, 0))
    inode = path.stat().st_ino
    assert write_optimizer(Folder(tmp_path), a_state(), "m") == written
    assert (path.stat().st_ino, path.stat().st_mtime > 0) == (inode, True)
    path.write_bytes(path.read_bytes()[:-1])
    assert write_optimizer(Folder(tmp_path), a_state(), "m") == written
    assert read_optimizer(Folder(tmp_path), written.digest, layout_of).step == 12


@pytest.mark.parametrize("at", [0, 5, 60, -1])
def test_a_changed_byte_is_detected(tmp_path: Path, at: int) -> None:
    written = write_optimizer(Folder(tmp_path), a_state(), "m")
    path = tmp_path / optimizer_key(written.digest)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(OptimizerUnreadable):
        read_optimizer(Folder(tmp_path), written.digest, layout_of)


def test_a_missing_file_or_one_of_another_base_model_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(OptimizerUnreadable, match="cannot be read"):
        read_optimizer(Folder(tmp_path), "0" * 64, layout_of)
    written = write_optimizer(Folder(tmp_path), a_state(), "m")
    wider = [Target("model.q_proj", "attn", 32, 32)]
    with pytest.raises(OptimizerUnreadable, match="values, not"):
        read_optimizer(Folder(tmp_path), written.digest, lambda spec: plan_layout(spec, wider))


def test_a_process_without_descriptors_does_not_report_a_lost_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = write_optimizer(Folder(tmp_path), a_state(), "m").digest
    monkeypatch.setattr("pathlib.Path.open", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        read_optimizer(Folder(tmp_path), digest, layout_of)


@pytest.mark.usefixtures("lost_disk")
def test_an_interrupted_write_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        write_optimizer(Folder(tmp_path), a_state(), "m")
    assert not list(tmp_path.glob("??/*.safetensors"))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"x" * 100])
def test_a_file_that_is_not_a_state_has_no_base_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.safetensors").write_bytes(content)
    assert base_model_of(Folder(tmp_path), "file.safetensors") is None
    assert base_model_of(Folder(tmp_path), "nothing.safetensors") is None


RUN = "session:train:0"


def a_run_state(*, dtype: torch.dtype = torch.float32, grads_pending: bool = True) -> AdapterState:
    generator = torch.Generator().manual_seed(0)
    weights, grads, m, v = (torch.randn(48, generator=generator, dtype=dtype) for _ in range(4))
    weights[0], grads[0] = float("-inf"), float("nan")  # special bit patterns
    spec = AdapterSpec(rank=3, seed=5, train_mlp=False)
    return AdapterState(spec, weights, grads, m, v, step=12, grads_pending=grads_pending)


def written(folder: Path, state: AdapterState, *, seq: int = 7, writer: str = "w0-1") -> Snapshot:
    return write_snapshot(Folder(folder), RUN, seq, writer, "numerics", state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grads_pending", [True, False])
def test_the_state_of_a_run_is_unchanged_by_writing_and_reading(
    tmp_path: Path, dtype: torch.dtype, grads_pending: bool
) -> None:
    state = a_run_state(dtype=dtype, grads_pending=grads_pending)
    snapshot = written(tmp_path, state)
    read = read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, RUN, 7)
    assert read.digest() == state.digest()
    assert (read.spec, read.step, read.grads_pending) == (state.spec, 12, grads_pending)


def test_a_snapshot_has_the_stated_size_and_place(tmp_path: Path) -> None:
    snapshot = written(tmp_path, a_run_state())
    assert (tmp_path / snapshot.file).stat().st_size == snapshot.size
    assert (tmp_path / snapshot.file).parent.stat().st_mode & 0o777 == 0o700
    assert RUN not in snapshot.file  # the name of a run comes from a client, and a path must not


def test_a_replaced_worker_never_overwrites_a_file_of_its_successor(tmp_path: Path) -> None:
    writers = ("w0-1", "w0-2", "w1-1")
    assert len({written(tmp_path, a_run_state(), writer=writer).file for writer in writers}) == 3


@pytest.mark.parametrize("at", [0, 5, 100, -1])
def test_a_changed_byte_of_a_snapshot_is_detected(tmp_path: Path, at: int) -> None:
    snapshot = written(tmp_path, a_run_state())
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
    snapshot = written(tmp_path, a_run_state())
    with pytest.raises(SnapshotUnreadable, match="is not of run"):
        read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, run, seq)


@pytest.mark.usefixtures("lost_disk")
def test_an_interrupted_snapshot_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        written(tmp_path, a_run_state())
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_removal_keeps_the_given_files_and_those_of_other_runs(tmp_path: Path) -> None:
    old, new = written(tmp_path, a_run_state(), seq=1), written(tmp_path, a_run_state(), seq=2)
    other = write_snapshot(Folder(tmp_path), "other", 1, "w0-1", "numerics", a_run_state())
    (tmp_path / new.file).with_name(".2-w0-1.safetensors.0f").write_bytes(b"half")
    remove_snapshots(Folder(tmp_path), RUN, frozenset({new.file}))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert left == sorted([new.file, other.file])
    assert old.file not in left
    remove_snapshots(Folder(tmp_path), RUN)
    remove_snapshots(Folder(tmp_path), RUN)  # repeating it has no effect
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == [other.file]


def test_equal_digests_mean_equal_states() -> None:
    state = a_run_state()
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
    kept, orphan = (written(tmp_path, a_run_state(), seq=seq).file for seq in (1, 2))
    damaged, half = ((tmp_path / orphan).with_name(name) for name in ("3-x-1.x", ".4-x-1.safetensors.0f"))
    for path in (damaged, half):
        path.write_bytes(b"torn")

    found = orphans(Folder(tmp_path), lambda run: frozenset({kept} if run == RUN else ()), lambda *_: False)

    assert sorted(found) == sorted([orphan, str(half.relative_to(tmp_path))])


def test_a_file_of_a_running_writer_is_no_orphan(tmp_path: Path) -> None:
    path = tmp_path / written(tmp_path, a_run_state(), seq=1).file
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
    snapshot = written(tmp_path, a_run_state())
    monkeypatch.setattr("pathlib.Path.open", no_descriptor)
    with pytest.raises(OSError, match="Too many"):
        read_snapshot(Folder(tmp_path), snapshot.file, snapshot.sha256, RUN, 7)
