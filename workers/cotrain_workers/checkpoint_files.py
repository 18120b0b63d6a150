"""All files of a saved adapter: written by a thread, read by the worker, deleted when nobody knows them.

Three folders, each for one part of a save: the adapter in PEFT's format, the optimizer state, and what
was encrypted. The first two are named after their content, so that writing one twice, or from two
workers, is harmless. Workers of all pools share the folders; each tidies up behind its own base model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from cotrain_store.files import make_folder
from cotrain_workers.external_files import base_model_of_files, remove_external, write_external
from cotrain_workers.optimizer_file import base_model_of_state, read_optimizer, write_optimizer
from cotrain_workers.peft_folder import CONFIG, folder_of, read_folder, remove_folder, write_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cotrain_store.messages.ids import WeightsRef
    from cotrain_store.saved_weights import SavedWeights
    from cotrain_workers.ops import HostOptimizer
    from cotrain_workers.peft_folder import LayoutOf
    from cotrain_workers.sample_ops import HostWeights
    from cotrain_workers.spec import Layout

log = structlog.get_logger()

#: A file that nothing refers to may be one that another worker is about to refer to; not after that.
ORPHAN_AGE_S = 3600.0


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
        """Write all a save owes, durable when this returns; raises OSError. Twice is harmless."""
        adapter = write_folder(self.adapters, saved.weights, layout, self.base_model)
        os.utime(adapter.path)  # young, also if it was found there
        size, optimizer_digest = adapter.size, ""
        if saved.optimizer:
            written = write_optimizer(self.optimizers, saved.optimizer, self.base_model)
            size, optimizer_digest = size + written.size, written.digest
        if saved.recipients:
            size += write_external(
                self.external, ref, adapter.path, saved.recipients, self.base_model
            )
        return WrittenFiles(adapter.digest, size, optimizer_digest)

    def adapter(self, digest: str) -> Path:
        """Name the folder of an adapter."""
        return folder_of(self.adapters, digest)

    def read_adapter(self, digest: str, layout_of: LayoutOf) -> HostWeights:
        """Read an adapter; raises FolderUnreadable, OSError."""
        return read_folder(self.adapter(digest), layout_of)

    def read_optimizer(self, digest: str, layout_of: LayoutOf) -> HostOptimizer:
        """Read an optimizer state; raises OptimizerUnreadable, OSError."""
        return read_optimizer(self.optimizers, digest, layout_of)

    def remove_orphans(self, saved: SavedWeights) -> None:
        """Delete the files of forgotten weights, and what dead processes left half done.

        Another worker may just be about to refer to a file that it found there, so only old ones go:
        whoever writes or finds one makes it young.
        """
        for path in self._old(self.adapters, "??/*", base_model_of_adapter, saved.knows):
            remove_folder(self.adapters, path.name)
        for path in self._old(
            self.optimizers,
            "??/*",
            base_model_of_state,
            lambda name: saved.knows_optimizer(name),
        ):
            path.unlink(missing_ok=True)
        for path in self._old(self.external, "*", base_model_of_files, saved.knows_external):
            remove_external(path)

    def _old(
        self,
        root: Path,
        pattern: str,
        base_model_of: Callable[[Path], str | None],
        is_known: Callable[[str], bool],
    ) -> Iterator[Path]:
        """Yield what is old and of this base model and nobody knows; delete what is unfinished."""
        for path in sorted(root.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                if time.time() - path.stat().st_mtime <= ORPHAN_AGE_S:
                    continue
                if path.name.startswith("."):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif base_model_of(path) == self.base_model and not is_known(path.stem):
                    log.info("files_removed", folder=root.name, name=path.stem)
                    yield path


def base_model_of_adapter(folder: Path) -> str | None:
    """Read which base model an adapter's folder is for; None where that cannot be read."""
    try:
        name: str | None = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name
