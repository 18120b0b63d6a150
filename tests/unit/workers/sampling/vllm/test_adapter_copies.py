"""Copies of adapters for vLLM: as many as there is room for, those in use in any case."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import (
    CONFIG,
    TENSORS,
    FolderUnreadable,
    key_of,
    read_folder,
    write_folder,
)
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.sampling.vllm.adapter_copies import AdapterCopies
from tests.support.saved_files import layout_of

if TYPE_CHECKING:
    from pathlib import Path

SPEC = AdapterSpec(rank=2, seed=0)
LAYOUT = layout_of(SPEC)


@pytest.fixture
def stored(tmp_path: Path) -> list[str]:
    """Store five adapters; give their digests."""
    root, weights = (
        Folder(tmp_path / "store"),
        [torch.full((LAYOUT.size,), float(n)) for n in range(5)],
    )
    return [write_folder(root, HostWeights(SPEC, flat), LAYOUT, "m").digest for flat in weights]


def size_of(tmp_path: Path, digest: str) -> int:
    return sum(file.stat().st_size for file in (tmp_path / "store" / key_of(digest)).iterdir())


def copies_in(tmp_path: Path, limit_bytes: int) -> AdapterCopies:
    store = Folder(tmp_path / "store")
    return AdapterCopies(store, tmp_path / "copies", limit_bytes, "m", layout_of)


def held(tmp_path: Path) -> set[str]:
    return {config.parent.name for config in (tmp_path / "copies").glob(f"??/*/{CONFIG}")}


def test_a_copy_holds_what_was_saved(tmp_path: Path, stored: list[str]) -> None:
    copies_in(tmp_path, 10**9).fetch(stored[3])
    assert read_folder(Folder(tmp_path / "copies"), stored[3], layout_of).flat.eq(3.0).all()


def test_the_longest_unused_makes_room(tmp_path: Path, stored: list[str]) -> None:
    copies = copies_in(tmp_path, 3 * size_of(tmp_path, stored[0]))
    for digest in (*stored[:3], stored[0], stored[3]):
        copies.fetch(digest)
    assert held(tmp_path) == {stored[0], stored[2], stored[3]}
    copies.fetch(stored[1])  # it comes back
    assert held(tmp_path) == {stored[0], stored[3], stored[1]}


def test_what_the_server_has_loaded_stays(tmp_path: Path, stored: list[str]) -> None:
    copies = copies_in(tmp_path, 2 * size_of(tmp_path, stored[0]))
    for number, digest in enumerate(stored):
        copies.fetch(digest, loaded=stored[: min(number, 3)])
    assert held(tmp_path) == {*stored[:3], stored[4]}


def test_a_process_begins_with_none(tmp_path: Path, stored: list[str]) -> None:
    copies_in(tmp_path, 10**9).fetch(stored[0])
    copies = copies_in(tmp_path, 10**9)
    assert held(tmp_path) == set()
    copies.fetch(stored[0])
    assert held(tmp_path) == {stored[0]}


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_gone_or_damaged_is_not_copied(
    tmp_path: Path, stored: list[str], is_there: bool
) -> None:
    tensors = tmp_path / "store" / key_of(stored[0]) / TENSORS
    if is_there:
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    else:
        tensors.unlink()
    with pytest.raises(FolderUnreadable):
        copies_in(tmp_path, 10**9).fetch(stored[0])
    assert held(tmp_path) == set()
