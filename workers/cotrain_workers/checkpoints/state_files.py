"""Files of training states in safetensors: optimizer states of saves, and recovery copies of runs.

Both are written whole or not at all, and checked when read.

**Optimizer states** are named by content: `<digest[:2]>/<digest>.safetensors`. The file is separate from its adapter,
because anyone may read the adapter's folder.

**Recovery copies** hold the whole state of a run: `<run digest>/<seq>-<writer>.safetensors`. The writer is a worker and
its epoch. A replaced worker therefore never overwrites a file of its successor, or of a worker to which its runs were
reassigned.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save

from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.protocol import Blobs, Moments
from cotrain_store.failpoints import failpoint
from cotrain_workers.checkpoints.peft_folder import LayoutOf, Written, metadata_of
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import HostOptimizer
from cotrain_workers.engine.spec import AdapterSpec

SUFFIX = ".safetensors"
OPTIMIZER_FORMAT = "cotrain-optimizer-1"
_OPTIMIZER_MOMENTS = Moments("optimizer.half_written", "optimizer.before_rename", "optimizer.renamed")
SNAPSHOT_FORMAT = "cotrain-snapshot-1"
_SNAPSHOT_MOMENTS = Moments("snapshot.half_written", "snapshot.before_rename", "snapshot.renamed")
ARENAS = ("weights", "grads", "m", "v")


class OptimizerUnreadable(Exception):
    """The file of an optimizer state is missing, incomplete, or does not match its name."""


def optimizer_key(digest: str) -> str:
    """Return the key of an optimizer state, written or not."""
    return f"{digest[:2]}/{digest}{SUFFIX}"


def write_optimizer(root: Blobs, optimizer: HostOptimizer, base_model: str) -> Written:
    """Write an optimizer state. On return it is durable under its final name and has a new timestamp.

    Idempotent, also for two processes at once, because equal content has one name. A damaged file of
    that name is replaced. Raises OSError.
    """
    digest = _optimizer_digest(optimizer, base_model)
    key, content = optimizer_key(digest), _optimizer_content(optimizer, base_model)
    if not (_is_whole(root, digest) and root.touch(key)):
        root.put(key, content, moments=_OPTIMIZER_MOMENTS)
    return Written(digest, key, len(content))


def read_optimizer(root: Blobs, digest: str, layout_of: LayoutOf) -> HostOptimizer:
    """Return an optimizer state, bit-identical to the one written.

    Raises:
        OptimizerUnreadable: the file is missing or incomplete, or does not match its name or its
            spec on this base model.
        OSError: this process cannot read anything now.
    """
    optimizer = _read_whole(root, digest)
    size = layout_of(optimizer.spec).size
    for moment in (optimizer.m, optimizer.v):
        if moment.shape != (size,):
            raise OptimizerUnreadable(f"State {digest} has {moment.numel()} values, not {size}.")
    return optimizer


def _read_whole(root: Blobs, digest: str) -> HostOptimizer:
    try:
        content = root.get(optimizer_key(digest))
        header = metadata_of(content)
        spec = AdapterSpec(**json.loads(header["spec"]))
        optimizer = HostOptimizer(spec, step=int(header["step"]), **load(content))
        found, is_ours = _optimizer_digest(optimizer, header["base_model"]), header["cotrain"] == OPTIMIZER_FORMAT
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as broken:
        if passes(broken):
            raise
        raise OptimizerUnreadable(f"State {digest} cannot be read: {broken!r}.") from broken
    if found != digest or not is_ours:
        raise OptimizerUnreadable(f"State {digest} is not what its name says.")
    return optimizer


def _is_whole(root: Blobs, digest: str) -> bool:
    try:
        _read_whole(root, digest)
    except OptimizerUnreadable:
        return False
    return True


def _optimizer_digest(optimizer: HostOptimizer, base_model: str) -> str:
    head = json.dumps([OPTIMIZER_FORMAT, base_model, optimizer.spec.stored(), optimizer.step], sort_keys=True)
    hasher = hashlib.sha256(head.encode() + b"\0")
    for moment in (optimizer.m, optimizer.v):
        hasher.update(moment.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()


def _optimizer_content(optimizer: HostOptimizer, base_model: str) -> bytes:
    header = {
        "cotrain": OPTIMIZER_FORMAT,
        "spec": json.dumps(optimizer.spec.stored()),
        "base_model": base_model,
        "step": str(optimizer.step),
    }
    content: bytes = save({"m": optimizer.m, "v": optimizer.v}, header)
    return content


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
    root.put(name, content, moments=_SNAPSHOT_MOMENTS)
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
    if (header["format"], header["run"], header["seq"]) != (SNAPSHOT_FORMAT, run, str(seq)):
        raise SnapshotUnreadable(f"Snapshot {file} is not of run {run} at seq {seq}.")
    return state


def encode_snapshot(run: str, seq: int, numerics_id: str, state: AdapterState) -> bytes:
    """Return a run's state as of `seq` as safetensors: the four arenas, and the other fields as metadata."""
    header = {
        "format": SNAPSHOT_FORMAT,
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
