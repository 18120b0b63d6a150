"""Write one of each kind of file that a server keeps, and print the durable ones.

`python -m tests.faults.power_writers FOLDER OTHER FAULTS` writes into FOLDER, and then with FAULTS
into OTHER. It prints `{path: SHA-256}` of the files of each. A write that fails at a failpoint is
repeated, as after a crash of the writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyrage
import torch

from cotrain_store import failpoints
from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.spool import Spool
from cotrain_store.messages.ids import WeightsRef
from cotrain_workers.checkpoints.files import CheckpointFiles, Saved
from cotrain_workers.checkpoints.state_files import write_snapshot
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import HostOptimizer, HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout

SPEC = AdapterSpec(rank=2, seed=3, train_mlp=False)
LAYOUT = plan_layout(SPEC, [Target("model.layers.0.self_attn.q_proj", "attn", 16, 16)])
ARENA = torch.ones(LAYOUT.size)
RECIPIENT = str(pyrage.x25519.Identity.generate().to_public())
REF = WeightsRef("s:train:0:4")


def write_body(spool: Spool, size: int) -> None:
    spool.put(bytes(size)).result()


def write_recovery_copy(folder: Path, seq: int) -> None:
    weights, grads, m, v = (ARENA * seq for _ in range(4))
    state = AdapterState(SPEC, weights, grads, m, v, step=seq, grads_pending=False)
    write_snapshot(Folder(folder), "s:train:0", seq, "w0-1", "numerics", state)


def write_save(files: CheckpointFiles) -> None:
    optimizer = HostOptimizer(SPEC, ARENA, ARENA.clone(), step=4)
    files.write(REF, Saved(HostWeights(SPEC, ARENA), optimizer, (RECIPIENT,)), LAYOUT)


def until_written(write: Callable[[], None]) -> None:
    """Retry a failed write, as the server does indefinitely."""
    for _ in range(4):
        with contextlib.suppress(OSError):
            return write()
    return write()


def write_all(folder: Path) -> dict[str, str]:
    """Write all files. Return their digests."""
    spool = Spool(folder / "spool", "w", segment_bytes=100)  # one segment per body
    files = CheckpointFiles(Folder(folder), "tiny")
    for write in (
        *(partial(write_body, spool, size) for size in (200, 300)),
        *(partial(write_recovery_copy, folder / "snapshots", seq) for seq in (3, 6)),
        partial(write_save, files),
    ):
        until_written(write)
    spool.close()
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files but unfinished ones, by path below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


if __name__ == "__main__":
    calm, disturbed, faults = sys.argv[1:]
    promised = [write_all(Path(calm))]
    failpoints._FAULTS = failpoints.Faults.configured({"COTRAIN_FAILPOINTS": faults})
    print(json.dumps([*promised, write_all(Path(disturbed))]))
