"""Files of recovery copies. They are written whole or not at all, and checked when read.

A key is `<run digest>/<seq>-<writer>.safetensors`. The writer is a worker and its epoch. A replaced worker therefore
never overwrites a file of its successor, or of a worker to which its runs were reassigned.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors.torch import load, save

from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.protocol import Blobs, Moments
from cotrain_store.failpoints import failpoint
from cotrain_workers.checkpoints.peft_folder import metadata_of
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.spec import AdapterSpec

FORMAT = "cotrain-snapshot-1"
SUFFIX = ".safetensors"
_MOMENTS = Moments("snapshot.half_written", "snapshot.before_rename", "snapshot.renamed")
ARENAS = ("weights", "grads", "m", "v")


class SnapshotUnreadable(Exception):
    """Error: a snapshot file is missing, torn, or of another run."""


@dataclass(frozen=True)
class Snapshot:
    """Complete file: its path below the snapshots folder, and the digest of its bytes."""

    file: str
    sha256: str
    size: int


def write_snapshot(root: Blobs, run: str, seq: int, writer: str, numerics_id: str, state: AdapterState) -> Snapshot:
    """Write a run's state as of `seq`, durable under its final name when this returns; raises OSError."""
    content = encode_snapshot(run, seq, numerics_id, state)
    name = f"{run_folder(run)}/{seq}-{writer}{SUFFIX}"
    failpoint("snapshot.before_write", run)
    root.put(name, content, moments=_MOMENTS)
    return Snapshot(name, hashlib.sha256(content).hexdigest(), len(content))


def read_snapshot(root: Blobs, file: str, sha256: str, run: str, seq: int) -> AdapterState:
    """Read a run's state back.

    Raises:
        SnapshotUnreadable: the bytes are not those that were registered for this run and seq.
        OSError: this process cannot read any file now.
    """
    try:
        content = root.get(file)
    except OSError as missing:
        if passes(missing):
            raise
        raise SnapshotUnreadable(f"Snapshot {file} cannot be read: {missing}.") from missing
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SnapshotUnreadable(f"Snapshot {file} does not match its digest.")
    header, state = decode_snapshot(content)
    if (header["format"], header["run"], header["seq"]) != (FORMAT, run, str(seq)):
        raise SnapshotUnreadable(f"Snapshot {file} is not of run {run} at seq {seq}.")
    return state


def encode_snapshot(run: str, seq: int, numerics_id: str, state: AdapterState) -> bytes:
    """Return a run's state as of `seq` as safetensors: the four arenas, and the other fields as metadata."""
    header = {
        "format": FORMAT,
        "run": run,
        "seq": str(seq),
        "numerics_id": numerics_id,
        "spec": json.dumps(state.spec.stored()),
        "step": str(state.step),
        "grads_pending": str(int(state.grads_pending)),
    }
    content: bytes = save({name: getattr(state, name) for name in ARENAS}, header)
    return content


def decode_snapshot(content: bytes) -> tuple[Mapping[str, str], AdapterState]:
    """Return the header and the state of `encode_snapshot`; the header has `run` and `seq`."""
    header = metadata_of(content)
    return header, AdapterState(
        spec=AdapterSpec(**json.loads(header["spec"])),
        step=int(header["step"]),
        grads_pending=header["grads_pending"] == "1",
        **load(content),
    )


def remove_snapshots(root: Blobs, run: str, keep: frozenset[str] = frozenset()) -> None:
    """Delete a run's files except those in `keep`. Idempotent. Raises OSError."""
    for blob in root.list(run_folder(run)):
        if blob.key not in keep:
            root.delete(blob.key)


def run_folder(run: str) -> str:
    """Return the folder of a run's files."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]
