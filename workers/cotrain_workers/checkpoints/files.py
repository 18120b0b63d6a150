"""All files of a saved adapter: written by a thread, read by the worker, deleted when nothing refers to them.

Three folders, each for one part of a save: the adapter in PEFT's format, the optimizer state, and what
was encrypted. The first two are named after their content, so that writing one twice, or from two
workers, is harmless. Workers of all pools share the folders; each tidies up behind its own base model.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from cotrain_store.disk.durable_files import make_folder
from cotrain_store.messages.weights import external_folder
from cotrain_workers.checkpoints.encrypted_export import (
    base_model_of_files,
    remove_external,
    write_external,
)
from cotrain_workers.checkpoints.optimizer_file import (
    base_model_of_state,
    file_of,
    read_optimizer,
    write_optimizer,
)
from cotrain_workers.checkpoints.peft_folder import (
    CONFIG,
    folder_of,
    read_folder,
    remove_folder,
    write_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cotrain_store.disk.orphan_ages import Unwanted
    from cotrain_store.messages.ids import WeightsRef
    from cotrain_store.weights.saved_weights import SavedWeights
    from cotrain_workers.checkpoints.peft_folder import LayoutOf
    from cotrain_workers.engine.ops import HostOptimizer, HostWeights
    from cotrain_workers.engine.spec import Layout

log = structlog.get_logger()


@dataclass(frozen=True)
class Saved:
    """What a save copied to the host, and whom it is to be encrypted to."""

    weights: HostWeights
    optimizer: HostOptimizer | None = None
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenFiles:
    """What is durable of a save; `size` is the bytes of all its files."""

    digest: str
    size: int
    optimizer_digest: str  # empty: it has none


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one base model's saves below the data directory."""

    adapters: Path
    optimizers: Path
    external: Path
    base_model: str
    removing: threading.Lock = field(default_factory=threading.Lock)
    """Who holds it removes files, or has them known: what is known by then is not removed."""

    @classmethod
    def below(cls, data_dir: Path, base_model: str) -> CheckpointFiles:
        """Make the folders."""
        adapters, optimizers, external = (
            data_dir / name for name in ("weights", "optimizers", "external")
        )
        for folder in (adapters, optimizers, external):
            make_folder(folder)
        return cls(adapters, optimizers, external, base_model)

    def write(self, ref: WeightsRef, saved: Saved, layout: Layout) -> WrittenFiles:
        """Write all files of a save, durable when this returns; raises OSError. Twice is harmless."""
        adapter = write_folder(self.adapters, saved.weights, layout, self.base_model)
        os.utime(adapter.path)  # another worker may have seen it unwanted, if it was found there
        size, optimizer_digest = adapter.size, ""
        if saved.optimizer:
            written = write_optimizer(self.optimizers, saved.optimizer, self.base_model)
            size, optimizer_digest = size + written.size, written.digest
        if saved.recipients:
            size += write_external(
                self.external, ref, adapter.path, saved.recipients, self.base_model
            )
        return WrittenFiles(adapter.digest, size, optimizer_digest)

    def confirm(self, ref: WeightsRef, saved: Saved, written: WrittenFiles) -> bool:
        """Touch all files of a save, which is about to be known; False when one is gone.

        There may have been a long while since they were written, if Redis was away.
        """
        paths = [self.adapter(written.digest)]
        if written.optimizer_digest:
            paths.append(file_of(self.optimizers, written.optimizer_digest))
        if saved.recipients:
            paths.append(self.external / external_folder(ref))
        try:
            for path in paths:
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def adapter(self, digest: str) -> Path:
        """Name the folder of an adapter."""
        return folder_of(self.adapters, digest)

    def read_adapter(self, digest: str, layout_of: LayoutOf) -> HostWeights:
        """Read an adapter; raises FolderUnreadable, OSError."""
        return read_folder(self.adapter(digest), layout_of)

    def read_optimizer(self, digest: str, layout_of: LayoutOf) -> HostOptimizer:
        """Read an optimizer state; raises OptimizerUnreadable, OSError."""
        return read_optimizer(self.optimizers, digest, layout_of)

    def remove_orphans(self, saved: SavedWeights, unwanted: Unwanted, now: float) -> None:
        """Delete the files of forgotten weights, and what dead processes left half done.

        Another worker may just be about to refer to a file that it found there, so only what was
        `unwanted` for long goes: a process that writes or finds one touches it.
        """
        of_adapters = self._orphans(self.adapters, "??/*", base_model_of_adapter, saved.knows)
        of_states = self._orphans(
            self.optimizers, "??/*", base_model_of_state, saved.knows_optimizer
        )
        of_external = self._orphans(self.external, "*", base_model_of_files, saved.knows_external)
        for path in unwanted.old((*of_adapters, *of_states, *of_external), now):
            with self.removing:
                if not path.name.startswith(".") and self._is_known(saved, path):
                    continue  # it was found by a save since
                log.info("files_removed", folder=str(path.relative_to(self.adapters.parent)))
                self._remove(path)

    def _is_known(self, saved: SavedWeights, path: Path) -> bool:
        if path.is_relative_to(self.adapters):
            return saved.knows(path.stem)
        if path.is_relative_to(self.external):
            return saved.knows_external(path.stem)
        return saved.knows_optimizer(path.stem)

    def _remove(self, path: Path) -> None:
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )
        elif path.is_relative_to(self.adapters):
            remove_folder(self.adapters, path.name)
        elif path.is_relative_to(self.external):
            remove_external(path)
        else:
            path.unlink(missing_ok=True)

    def _orphans(
        self,
        root: Path,
        pattern: str,
        base_model_of: Callable[[Path], str | None],
        is_known: Callable[[str], bool],
    ) -> Iterator[Path]:
        """Yield what is unfinished, and what is of this base model and nothing refers to."""
        for path in sorted(root.glob(pattern)):
            if path.name.startswith(".") or (
                base_model_of(path) == self.base_model and not is_known(path.stem)
            ):
                yield path


def base_model_of_adapter(folder: Path) -> str | None:
    """Read which base model an adapter's folder is for; None where that cannot be read."""
    try:
        name: str | None = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name
