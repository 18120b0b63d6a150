"""Recovery copies of runs on disk: written whole or not at all, and checked when read.

A file is `<folder>/<run digest>/<seq>-<writer>.safetensors`. The writer is a worker and its epoch: so one
that was replaced never writes over a file of its successor, or of a worker that its runs were reassigned to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from safetensors.torch import load, save

from cotrain_store.disk.durable_files import passes, sync_folder
from cotrain_store.failpoints import failpoint, write_past
from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.spec import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FORMAT = "cotrain-snapshot-1"
TEMPORARY = ".tmp"
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
    folder: Path, run: str, seq: int, writer: str, numerics_id: str, state: AdapterState
) -> Snapshot:
    """Write a run's state as of `seq`, durable under its final name when this returns."""
    content = encode_snapshot(run, seq, numerics_id, state)
    name = f"{run_folder(run)}/{seq}-{writer}.safetensors"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(TEMPORARY)
    failpoint("snapshot.before_write", run)
    with temporary.open("wb") as file:
        write_past("snapshot.half_written", file, content)
        file.flush()
        os.fsync(file.fileno())
    failpoint("snapshot.before_rename", run)
    temporary.rename(path)
    failpoint("snapshot.renamed", run)
    sync_folder(path.parent)
    sync_folder(folder)  # the name of the run's own folder
    return Snapshot(name, hashlib.sha256(content).hexdigest(), len(content))


def read_snapshot(folder: Path, file: str, sha256: str, run: str, seq: int) -> AdapterState:
    """Read a run's state back.

    Raises:
        SnapshotUnreadable: the bytes are not those that were registered for this run and seq.
        OSError: this process cannot read anything now.
    """
    try:
        content = (folder / file).read_bytes()
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


def remove_snapshots(folder: Path, run: str, keep: frozenset[str] = frozenset()) -> None:
    """Delete a run's files except those in `keep`, and its folder with the last. Twice is harmless."""
    own = folder / run_folder(run)
    for path in own.glob("*"):
        if f"{path.parent.name}/{path.name}" not in keep:
            path.unlink(missing_ok=True)
    if not keep:
        with contextlib.suppress(
            OSError
        ):  # it is not there, or another worker has just written to it
            own.rmdir()


def orphans(
    folder: Path,
    bases: Callable[[RunId], frozenset[str]],
    is_at_work: Callable[[str, str], bool],
) -> list[Path]:
    """List the files that may go: what a dead process left half written, and what no log goes on from.

    A file is there before it is registered: `is_at_work` tells, of a run's folder and a writer, whether
    one may be about to be. `bases` names a run's registered files. A damaged file names no run, and stays.
    """
    return [
        path
        for path in sorted(folder.glob("*/*"))
        if not is_at_work(path.parent.name, path.stem.partition("-")[2])
        and (path.suffix == TEMPORARY or _is_orphan(path, bases))
    ]


def _is_orphan(path: Path, bases: Callable[[RunId], frozenset[str]]) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            run = _header(start + file.read(int.from_bytes(start, "little")))["run"]
    except (OSError, ValueError, KeyError, OverflowError, MemoryError):
        return False
    return f"{path.parent.name}/{path.name}" not in bases(RunId(run))


def _header(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def run_folder(run: str) -> str:
    """Name the folder of a run's files."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]
