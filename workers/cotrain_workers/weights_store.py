"""Sampler weights on this worker: used at once from memory, written to disk behind everybody's back.

A save copies an adapter to the host and commits; the file comes later. Until it is durable its
weights are *owed*: if the process dies, the log makes them again, which is why no log is cut past a
save that is owed (`unstored`). Folders are named after their content, so that writing one twice, or
from two workers, is harmless.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from cotrain_workers.peft_folder import (
    CONFIG,
    FolderUnreadable,
    folder_of,
    read_folder,
    remove_folder,
    remove_unfinished,
    write_folder,
)
from cotrain_workers.sample_ops import WeightsGone

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from cotrain_store.messages import RunId, WeightsRecord, WeightsRef
    from cotrain_store.sampling import Sampling
    from cotrain_workers.peft_folder import LayoutOf, WrittenFolder
    from cotrain_workers.sample_ops import HostWeights
    from cotrain_workers.spec import Layout

log = structlog.get_logger()

#: A write that failed (a full disk, most likely) is tried again after so long.
RETRY_S = 5.0
#: Weights that nobody uses any more are looked for this often, their folders once per ORPHAN_AGE_S.
SWEEP_S = 60.0
#: A folder that nothing refers to may be one that another worker is about to refer to; not after that.
ORPHAN_AGE_S = 3600.0


@dataclass
class _Owed:
    """Weights whose file is not known to be durable."""

    record: WeightsRecord
    weights: HostWeights | None
    """None: made by a process that died, and still to be made again by a replay."""
    writing: Future[WrittenFolder] | None = None
    retry_at: float = 0.0


class WeightsStore:
    """Every sampler weights this worker can serve. For one thread; only the writing is another's."""

    def __init__(
        self,
        sampling: Sampling,
        folder: Path,
        base_model: str,
        layout_of: LayoutOf,
        memory_bytes: int,
    ) -> None:
        """`memory_bytes` is for weights that are on disk too; those that are not stay anyway.

        Workers of all pools share `folder`; each tidies up behind its own base model only.
        """
        self._sampling = sampling
        self._folder = folder
        self._base_model = base_model
        self._layout_of = layout_of
        self._memory_bytes = memory_bytes
        self._owed: dict[WeightsRef, _Owed] = {}
        self._given_up: set[WeightsRef] = set()
        self._recent: OrderedDict[WeightsRef, HostWeights] = OrderedDict()
        self._digests: dict[WeightsRef, str] = {}
        self._sweep_at = self._orphans_at = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weights")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.recall()

    def recall(self) -> None:
        """Learn which weights are owed: by a predecessor, or by a commit whose answer was lost."""
        for record in self._sampling.unstored():
            if record.ref not in self._given_up:
                self._owed.setdefault(record.ref, _Owed(record, None))

    def put(self, record: WeightsRecord, weights: HostWeights) -> None:
        """Take the weights of a save that was committed. Twice is harmless: they are the same."""
        owed = self._owed.setdefault(record.ref, _Owed(record, None))
        if owed.weights is None:
            owed.weights = weights
            self._write(owed)

    def put_again(self, ref: WeightsRef, weights: HostWeights) -> None:
        """Take weights that a replay made again, where they are still owed."""
        if ref in self._owed:
            self.put(self._owed[ref].record, weights)

    def is_lost(self, ref: WeightsRef) -> bool:
        """Tell whether only a replay of their run can bring these weights back."""
        return ref in self._owed and self._owed[ref].weights is None

    def lost(self) -> list[WeightsRecord]:
        """List the weights that were lost with a process before they were durable."""
        return [owed.record for owed in self._owed.values() if owed.weights is None]

    def give_up(self, ref: WeightsRef) -> None:
        """Stop owing weights that no replay can bring back."""
        log.error("weights_lost", weights=ref)
        self._owed.pop(ref, None)
        self._given_up.add(ref)

    def unstored(self, run: RunId) -> int | None:
        """Name the first save of a run whose weights are owed: its log is needed from there on."""
        mine = [ref for ref, owed in self._owed.items() if owed.record.run == run]
        return min((int(ref.rpartition(":")[2]) for ref in mine), default=None)

    def is_known(self, ref: WeightsRef) -> bool:
        """Tell whether these weights exist; from then on `host` does not need to ask the store."""
        if ref in self._owed or ref in self._digests:
            return True
        record = self._sampling.weights(ref)
        if record is None or not record.digest:
            return False
        self._digests[ref] = record.digest
        return True

    def host(self, ref: WeightsRef) -> HostWeights:
        """Give the weights, from memory or from disk.

        Raises:
            WeightsGone: they are neither here nor there.
        """
        owed = self._owed.get(ref)
        if owed and owed.weights:
            return owed.weights
        if ref in self._recent:
            self._recent.move_to_end(ref)
            return self._recent[ref]
        weights = self._read(ref)
        self._remember(ref, weights)
        return weights

    def path(self, ref: WeightsRef) -> Path | None:
        """Name the folder of weights; None while it is being written.

        Raises:
            WeightsGone: there is none, and there will be none.
        """
        if ref in self._owed:
            return None
        if not self.is_known(ref):
            raise WeightsGone(ref)
        return folder_of(self._folder, self._digests[ref])

    def _read(self, ref: WeightsRef) -> HostWeights:
        path = self.path(ref)
        if path is None:
            raise WeightsGone(ref)
        try:
            return read_folder(path, self._layout_of)
        except FolderUnreadable as unreadable:
            log.error("weights_unreadable", weights=ref, reason=str(unreadable))  # noqa: TRY400
            raise WeightsGone(ref) from unreadable

    def tend(self) -> list[WeightsRef]:
        """Note what has become durable, try again what could not be written, and now and then sweep.

        Returns weights that nobody can ask for any more.
        """
        self._note_written()
        now = time.monotonic()
        if now >= self._orphans_at:
            self._orphans_at = now + ORPHAN_AGE_S
            self.remove_orphans()
        if now < self._sweep_at:
            return []
        self._sweep_at = now + SWEEP_S
        return self.sweep()

    def _note_written(self) -> None:
        now = time.monotonic()
        for ref, owed in list(self._owed.items()):
            if owed.writing is None:
                if owed.weights and now >= owed.retry_at:
                    self._write(owed)
            elif owed.writing.done():
                self._note(ref, owed, owed.writing)

    def drain(self, deadline_s: float) -> None:
        """Wait for what is being written; what is left is made again from the log."""
        writing = [owed.writing for owed in self._owed.values() if owed.writing]
        wait(writing, deadline_s)
        self._note_written()
        self._writer.shutdown(wait=False, cancel_futures=True)

    def sweep(self) -> list[WeightsRef]:
        """Forget weights that nobody can ask for any more, and name them."""
        self.recall()
        unused = [record.ref for record in self._sampling.unused_weights()]
        for ref in (*unused, *self._given_up):
            self._sampling.forget_weights(ref)
            self._recent.pop(ref, None)
            self._digests.pop(ref, None)
        if unused:
            log.info("weights_forgotten", count=len(unused))
        return unused

    def remove_orphans(self) -> None:
        """Delete the folders of forgotten weights, and what dead processes left half done.

        Another worker may just be about to refer to a folder that it found there, so only old ones go:
        whoever writes or finds a folder makes it young.
        """
        with contextlib.suppress(FileNotFoundError):  # another worker was faster; again in an hour
            remove_unfinished(self._folder)
            for path in old_folders(self._folder, time.time()):
                if base_model_of(path) == self._base_model and not self._sampling.knows(path.name):
                    remove_folder(self._folder, path.name)
                    log.info("weights_removed", digest=path.name)

    def _write(self, owed: _Owed) -> None:
        assert owed.weights is not None
        layout = self._layout_of(owed.weights.spec)
        owed.writing = self._writer.submit(
            _write_young, self._folder, owed.weights, layout, self._base_model
        )

    def _note(self, ref: WeightsRef, owed: _Owed, writing: Future[WrittenFolder]) -> None:
        try:
            written = writing.result()
        except OSError as failed:
            log.error("weights_not_written", weights=ref, reason=str(failed))  # noqa: TRY400
            owed.writing, owed.retry_at = None, time.monotonic() + RETRY_S
            return
        self._sampling.stored(ref, written.digest, written.size)
        del self._owed[ref]  # only now: while Redis is away they stay written and owed
        self._digests[ref] = written.digest
        assert owed.weights is not None
        self._remember(ref, owed.weights)
        log.info("weights_stored", weights=ref, digest=written.digest, size=written.size)

    def _remember(self, ref: WeightsRef, weights: HostWeights) -> None:
        self._recent[ref] = weights
        held = sum(_size(each) for each in self._recent.values())
        while held > self._memory_bytes:
            _, oldest = self._recent.popitem(last=False)
            held -= _size(oldest)


def old_folders(folder: Path, now: float) -> list[Path]:
    """List the folders that nobody wrote or found lately."""
    found = [path for path in sorted(folder.glob("??/*")) if not path.name.startswith(".")]
    return [path for path in found if now - path.stat().st_mtime > ORPHAN_AGE_S]


def base_model_of(folder: Path) -> str | None:
    """Read which base model an adapter's folder is for; None where that cannot be read."""
    try:
        name: str | None = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name


def _write_young(
    folder: Path, weights: HostWeights, layout: Layout, base_model: str
) -> WrittenFolder:
    written = write_folder(folder, weights, layout, base_model)
    os.utime(written.path)
    return written


def _size(weights: HostWeights) -> int:
    return weights.flat.numel() * weights.flat.element_size()
