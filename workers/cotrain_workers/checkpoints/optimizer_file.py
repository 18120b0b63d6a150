"""Files of saved optimizer states, named by content. A write is atomic, and a read verifies the content.

A key is `<digest[:2]>/<digest>.safetensors`. The file is separate from its adapter, because anyone
may read the adapter's folder.
"""

import hashlib
import json
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save

from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable, Moments
from cotrain_workers.checkpoints.peft_folder import LayoutOf, metadata_of, read_metadata
from cotrain_workers.engine.ops import HostOptimizer
from cotrain_workers.engine.spec import AdapterSpec

FORMAT = "cotrain-optimizer-1"
SUFFIX = ".safetensors"
_MOMENTS = Moments("optimizer.half_written", "optimizer.before_rename", "optimizer.renamed")


class OptimizerUnreadable(Exception):
    """The file of an optimizer state is missing, incomplete, or does not match its name."""


@dataclass(frozen=True)
class WrittenOptimizer:
    """Durable optimizer state: the digest that names it, and the bytes of its file."""

    digest: str
    size: int


def key_of(digest: str) -> str:
    """Return the key of an optimizer state, written or not."""
    return f"{digest[:2]}/{digest}{SUFFIX}"


def write_optimizer(root: Blobs, optimizer: HostOptimizer, base_model: str) -> WrittenOptimizer:
    """Write an optimizer state. On return it is durable under its final name and has a new timestamp.

    Idempotent, also for two processes at once, because equal content has one name. A damaged file of
    that name is replaced. Raises OSError.
    """
    digest = _digest(optimizer, base_model)
    content = _content(optimizer, base_model)
    if not (_is_whole(root, digest) and root.touch(key_of(digest))):
        root.put(key_of(digest), content, moments=_MOMENTS)
    return WrittenOptimizer(digest, len(content))


def read_optimizer(root: Blobs, digest: str, layout_of: LayoutOf) -> HostOptimizer:
    """Return an optimizer state, bit-identical to the one written.

    Raises:
        OptimizerUnreadable: the file is missing or incomplete, or does not match its name or its
            spec on this base model.
        OSError: this process cannot read anything now.
    """
    optimizer = _read(root, digest)
    size = layout_of(optimizer.spec).size
    for moment in (optimizer.m, optimizer.v):
        if moment.shape != (size,):
            raise OptimizerUnreadable(f"State {digest} has {moment.numel()} values, not {size}.")
    return optimizer


def base_model_of_state(root: Blobs, key: str) -> str | None:
    """Return the base model of a state, or None if it cannot be read. Raises BlobsUnavailable."""
    try:
        return read_metadata(root, key)["base_model"]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(root: Blobs, digest: str) -> HostOptimizer:
    try:
        content = root.get(key_of(digest))
        header = metadata_of(content)
        spec = AdapterSpec(**json.loads(header["spec"]))
        optimizer = HostOptimizer(spec, step=int(header["step"]), **load(content))
        found, is_ours = _digest(optimizer, header["base_model"]), header["cotrain"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as broken:
        if passes(broken):
            raise
        raise OptimizerUnreadable(f"State {digest} cannot be read: {broken!r}.") from broken
    if found != digest or not is_ours:
        raise OptimizerUnreadable(f"State {digest} is not what its name says.")
    return optimizer


def _is_whole(root: Blobs, digest: str) -> bool:
    try:
        _read(root, digest)
    except OptimizerUnreadable:
        return False
    return True


def _digest(optimizer: HostOptimizer, base_model: str) -> str:
    head = json.dumps([FORMAT, base_model, optimizer.spec.stored(), optimizer.step], sort_keys=True)
    hasher = hashlib.sha256(head.encode() + b"\0")
    for moment in (optimizer.m, optimizer.v):
        hasher.update(moment.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()


def _content(optimizer: HostOptimizer, base_model: str) -> bytes:
    header = {
        "cotrain": FORMAT,
        "spec": json.dumps(optimizer.spec.stored()),
        "base_model": base_model,
        "step": str(optimizer.step),
    }
    content: bytes = save({"m": optimizer.m, "v": optimizer.v}, header)
    return content
