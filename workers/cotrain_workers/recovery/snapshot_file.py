"""Recovery copies of runs: written whole or not at all, and checked when read.

A key is `<run digest>/<seq>-<writer>.safetensors`. The writer is a worker and its epoch: so one
that was replaced never writes over a file of its successor, or of a worker that its runs were reassigned to.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from safetensors.torch import load, save

from cotrain_store.blobs.durable_files import passes
from cotrain_store.blobs.protocol import BlobsUnavailable, Moments
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.spec import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cotrain_store.blobs.protocol import Blobs

FORMAT = "cotrain-snapshot-1"
SUFFIX = ".safetensors"
#: What an older version had half written.
TEMPORARY = ".tmp"
_MOMENTS = Moments("snapshot.half_written", "snapshot.before_rename", "snapshot.renamed")
ARENAS = ("weights", "grads", "m", "v")


class SnapshotUnreadable(Exception):
    """A snapshot file is missing, torn, or of another run."""


@dataclass(frozen=True)
class Snapshot:
    """A complete file: its path below the snapshots folder, and the digest of its bytes."""

    file: str
    sha256: str
    size: int


def write_snapshot(
    root: Blobs, run: str, seq: int, writer: str, numerics_id: str, state: AdapterState
) -> Snapshot:
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
        OSError: this process cannot read anything now.
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
    """Write a run's state as of `seq` as safetensors: the four arenas, and what else there is to it."""
    header = {
        "format": FORMAT,
        "run": run,
        "seq": str(seq),
        "numerics_id": numerics_id,
        "spec": json.dumps(asdict(state.spec)),
        "step": str(state.step),
        "grads_pending": str(int(state.grads_pending)),
    }
    content: bytes = save({name: getattr(state, name) for name in ARENAS}, header)
    return content


def decode_snapshot(content: bytes) -> tuple[Mapping[str, str], AdapterState]:
    """Read `encode_snapshot` back: its header, whose `run` and `seq` say whose state it is."""
    header = _header(content)
    return header, AdapterState(
        spec=AdapterSpec(**json.loads(header["spec"])),
        step=int(header["step"]),
        grads_pending=header["grads_pending"] == "1",
        **load(content),
    )


def remove_snapshots(root: Blobs, run: str, keep: frozenset[str] = frozenset()) -> None:
    """Delete a run's files except those in `keep`. Twice is harmless. Raises OSError."""
    for blob in root.list(run_folder(run)):
        if blob.key not in keep:
            root.delete(blob.key)


def orphans(
    root: Blobs,
    bases: Callable[[RunId], frozenset[str]],
    is_at_work: Callable[[str, str], bool],
) -> dict[str, str]:
    """Find the files that may go, each with its mark: what a dead process left half written, and what no log
    goes on from.

    A file is there before it is registered: `is_at_work` tells, of a run's folder and a writer, whether
    one may be about to be. `bases` names a run's registered files. A damaged file names no run, and stays.
    """
    return {
        blob.key: blob.mark
        for blob in root.list()
        if not is_at_work(blob.key.partition("/")[0], _writer(blob.key))
        and (
            blob.is_unfinished or blob.key.endswith(TEMPORARY) or _is_orphan(root, blob.key, bases)
        )
    }


def _writer(key: str) -> str:
    """Name who writes or wrote a file, whatever is behind the name of it."""
    name = key.rpartition("/")[2].partition("-")[2]
    return name.partition(SUFFIX)[0].removesuffix(TEMPORARY)


def _is_orphan(root: Blobs, key: str, bases: Callable[[RunId], frozenset[str]]) -> bool:
    try:
        head = root.get(key, (0, 8))
        length = int.from_bytes(head, "little")
        run = _header(head + root.get(key, (8, 8 + length)))["run"]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError, OverflowError, MemoryError):
        return False
    return key not in bases(RunId(run))


def _header(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def run_folder(run: str) -> str:
    """Name the folder of a run's files."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]
