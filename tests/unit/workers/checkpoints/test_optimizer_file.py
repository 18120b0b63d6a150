"""Files of optimizer states: identical bits, complete or missing, and named after their content."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.optimizer_file import (
    OptimizerUnreadable,
    base_model_of_state,
    key_of,
    read_optimizer,
    write_optimizer,
)
from cotrain_workers.engine.ops import HostOptimizer
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
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
    path = tmp_path / key_of(written.digest)
    assert path.stat().st_size == written.size
    assert base_model_of_state(Folder(tmp_path), key_of(written.digest)) == "m"


def test_equal_states_share_a_file_and_different_ones_do_not(tmp_path: Path) -> None:
    state = a_state()
    others = [replace(state, step=13), replace(state, m=state.v, v=state.m), replace(state, spec=replace(SPEC, seed=4))]
    digests = [write_optimizer(Folder(tmp_path), each, "m").digest for each in (state, a_state(), *others)]
    digests.append(write_optimizer(Folder(tmp_path), state, "another").digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5 == len(list(tmp_path.glob("??/*")))


def test_an_existing_file_is_touched_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    written = write_optimizer(Folder(tmp_path), a_state(), "m")
    path = tmp_path / key_of(written.digest)
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
    path = tmp_path / key_of(written.digest)
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
    (tmp_path / "file").write_bytes(content)
    assert base_model_of_state(Folder(tmp_path), "file") is None
    assert base_model_of_state(Folder(tmp_path), "nothing") is None
