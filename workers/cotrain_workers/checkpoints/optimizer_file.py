"""Optimizer states on disk, named by what is in them: written whole or not at all, checked when read.

A file is `<root>/<digest[:2]>/<digest>.safetensors`; it lies apart from the adapter it belongs to, whose
folder anyone may read.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load, save

from cotrain_store.disk.durable_files import passes, sync_folder
from cotrain_store.failpoints import failpoint, write_past
from cotrain_workers.engine.ops import HostOptimizer
from cotrain_workers.engine.spec import AdapterSpec

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_workers.checkpoints.peft_folder import LayoutOf

FORMAT = "cotrain-optimizer-1"
SUFFIX = ".safetensors"


class OptimizerUnreadable(Exception):
    """A file of optimizer state is missing, torn, or holds something other than its name says."""


@dataclass(frozen=True)
class WrittenOptimizer:
    """A durable optimizer state: the digest that names it, the bytes of its file."""

    digest: str
    size: int


def file_of(root: Path, digest: str) -> Path:
    """Return where the optimizer state of this digest lies, whether or not it has been written."""
    return root / digest[:2] / f"{digest}{SUFFIX}"


def write_optimizer(root: Path, optimizer: HostOptimizer, base_model: str) -> WrittenOptimizer:
    """Write an optimizer state, durable under its final name when this returns, and young.

    Twice is harmless, also from two processes at once: equal content has one name. A damaged file of
    that name is replaced.
    """
    digest = _digest(optimizer, base_model)
    path = file_of(root, digest)
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f".{digest}.{uuid4().hex}")
        with unfinished.open("wb") as file:
            write_past("optimizer.half_written", file, _content(optimizer, base_model))
            file.flush()
            os.fsync(file.fileno())
        failpoint("optimizer.before_rename")
        unfinished.rename(path)
        failpoint("optimizer.renamed")
    # Found there, it may have been named by a process that died before it could do this.
    sync_folder(path.parent)
    sync_folder(root)
    os.utime(path)
    return WrittenOptimizer(digest, path.stat().st_size)


def read_optimizer(root: Path, digest: str, layout_of: LayoutOf) -> HostOptimizer:
    """Read an optimizer state back, equal to the bit.

    Raises:
        OptimizerUnreadable: the file is missing or torn, or is not what its name and its spec on this
            base model stand for.
        OSError: this process cannot read anything now.
    """
    optimizer = _read(file_of(root, digest))
    size = layout_of(optimizer.spec).size
    for moment in (optimizer.m, optimizer.v):
        if moment.shape != (size,):
            raise OptimizerUnreadable(f"State {digest} has {moment.numel()} values, not {size}.")
    return optimizer


def base_model_of_state(path: Path) -> str | None:
    """Read which base model a file is for; None where that cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            start += file.read(min(int.from_bytes(start, "little"), 1 << 20))
        return _metadata(start)["base_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> HostOptimizer:
    try:
        content = path.read_bytes()
        header = _metadata(content)
        spec = AdapterSpec(**json.loads(header["spec"]))
        optimizer = HostOptimizer(spec, step=int(header["step"]), **load(content))
        digest, is_ours = _digest(optimizer, header["base_model"]), header["cotrain"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as broken:
        if passes(broken):
            raise
        raise OptimizerUnreadable(f"State {path.stem} cannot be read: {broken!r}.") from broken
    if digest != path.stem or not is_ours:
        raise OptimizerUnreadable(f"State {path.stem} is not what its name says.")
    return optimizer


def _is_whole(path: Path) -> bool:
    try:
        _read(path)
    except OptimizerUnreadable:
        return False
    return True


def _digest(optimizer: HostOptimizer, base_model: str) -> str:
    head = json.dumps([FORMAT, base_model, asdict(optimizer.spec), optimizer.step], sort_keys=True)
    hasher = hashlib.sha256(head.encode() + b"\0")
    for moment in (optimizer.m, optimizer.v):
        hasher.update(moment.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()


def _content(optimizer: HostOptimizer, base_model: str) -> bytes:
    header = {
        "cotrain": FORMAT,
        "spec": json.dumps(asdict(optimizer.spec)),
        "base_model": base_model,
        "step": str(optimizer.step),
    }
    content: bytes = save({"m": optimizer.m, "v": optimizer.v}, header)
    return content


def _metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata
