"""Small weights to save, the store that writes them, and the files of the store."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyrage
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_store.messages.runs import RunRecord, WeightsRecord
from cotrain_workers.checkpoints.files import CheckpointFiles, Saved
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.ops import HostOptimizer, HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from tests.support.samples import Samples
from tests.support.stack import MODEL

SPEC = AdapterSpec(rank=2, seed=0)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


KEY = pyrage.x25519.Identity.generate()
SIZE = 4 * layout_of(SPEC).size  # bytes


def weights_store(
    samples: Samples, tmp_path: Path, memory_bytes: int = 10 * SIZE, unstored_bytes: int = 10 * SIZE
) -> WeightsStore:
    """Make a worker's store of saved weights, with its files below `tmp_path`."""
    files = CheckpointFiles(Folder(tmp_path), MODEL)
    return WeightsStore(samples.saved, files, layout_of, memory_bytes, unstored_bytes)


def weights_of(value: float) -> Saved:
    return Saved(HostWeights(SPEC, torch.full((layout_of(SPEC).size,), value)))


def state_of(value: float) -> Saved:
    """Make the state that a training checkpoint copies."""
    m, v = (torch.full((layout_of(SPEC).size,), value * factor) for factor in (2, 3))
    return replace(weights_of(value), optimizer=HostOptimizer(SPEC, m, v, step=7))


def full(*_: object) -> None:
    raise OSError("No space left on device")


async def saved(samples: Samples, run: RunRecord, seq: int, **as_what: Any) -> WeightsRecord:
    _, saves = await samples.save(run, seq, **as_what)
    return saves[run.id, seq].weights


def written(store: WeightsStore) -> None:
    """Wait for the writer."""
    for owed in list(store._unstored.values()):
        if owed.writing:
            owed.writing.exception(60)
    store._finish_writes()


def sweep_files(store: WeightsStore, samples: Samples, after_s: float = 0.0) -> None:
    """Remove unreferenced files of a store, at a time `after_s` seconds from now."""
    store._files.remove_orphans(samples.saved, store._file_sweep.unwanted, time.monotonic() + after_s)


def files_in(tmp_path: Path) -> set[str]:
    """Return the files of all saves, including those of unfinished ones."""
    found = [path for path in tmp_path.glob("[weo]*/**/*") if path.is_file() or ".torn" in path.name]
    return {str(path.relative_to(tmp_path)) for path in found}


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "weights").glob("??/*"))
