"""Removal of unreferenced files: segments of the spool, and recovery copies.

A process may be about to refer to any of them. Files held by a process stay. The others are removed only after this
worker has seen them unreferenced for a long time (`cotrain_store.blobs.protocol`). A process suspended for longer
finds its segment closed to new references (`SpoolReferences`).
"""

import math
from collections.abc import Callable, Collection

import structlog

from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.disk.object_spool import OBJECTS_REST
from cotrain_store.disk.spool import unwritten_segments
from cotrain_store.disk.sweep import UnreferencedFiles
from cotrain_store.messages.ids import RunId
from cotrain_store.oplog.execution import Execution
from cotrain_store.settings import WorkerSettings
from cotrain_workers.checkpoints.peft_folder import read_metadata
from cotrain_workers.checkpoints.state_files import SUFFIX, run_folder

log = structlog.get_logger()

#: Intervals in s of sweeping the spool, and the recovery copies. The latter is longer, because each copy is opened.
SWEEP_S = 60.0
LOOK_S = 3600.0


class OrphanSweep:
    """Unreferenced segments and copies seen by one worker. `now` is a time of the monotonic clock."""

    def __init__(self, execution: Execution, settings: WorkerSettings) -> None:
        self._execution = execution
        self._spool = settings.blob_store.below("spool")
        self._snapshots = settings.blob_store.below("snapshots")
        self._age_s = settings.orphan_age_s
        self._has_locks = self._spool.folder is not None
        self._lease = None if self._has_locks else execution.sweep_lease()
        self._begin()

    def _begin(self) -> None:
        """Reset the observations, because those from before another worker swept are invalid."""
        segments_age_s = self._age_s if self._has_locks else OBJECTS_REST * self._age_s
        self._segments, self._copies = UnreferencedFiles(segments_age_s), UnreferencedFiles(self._age_s)
        self._segments_at = self._copies_at = -math.inf

    def maintain(self, now: float, writing: Collection[RunId]) -> None:
        """Remove old files if a sweep is due. Copies of runs in `writing` may be registered soon."""
        if self._lease and not self._lease.is_mine(now):
            self._begin()
            return
        if now >= self._segments_at:
            self._segments_at = now + min(SWEEP_S, self._age_s)
            self._sweep_segments(now)
        if now >= self._copies_at:
            self._sweep_copies(now, writing)
            self._copies_at = now + (LOOK_S if self._copies.is_empty else self._age_s)

    def _sweep_segments(self, now: float) -> None:
        free = unwritten_segments(self._spool)
        # Read the references afterwards: from then on nothing is added to these segments.
        referenced = self._execution.spool_references.referenced()
        unwanted = {key: mark for key, mark in free.items() if key not in referenced}
        old = self._segments.old(unwanted, now)
        for key in self._execution.spool_references.close(old):
            self._spool.delete(key)
            log.info("segment_removed", file=key)

    def _sweep_copies(self, now: float, writing: Collection[RunId]) -> None:
        mine, writers = self._execution.writer, self._execution.living_writers()
        folders = {run_folder(run) for run in writing}

        def is_at_work(folder: str, writer: str) -> bool:
            return folder in folders if writer == mine else writer in writers

        unwanted = orphans(self._snapshots, self._execution.logs.bases, is_at_work)
        for key in self._copies.old(unwanted, now):
            self._snapshots.delete(key)
            log.info("snapshot_removed", file=key)


def orphans(
    root: Blobs, bases: Callable[[RunId], frozenset[str]], is_at_work: Callable[[str, str], bool]
) -> dict[str, str]:
    """Find the removable files, each with its mark: partial files of crashed processes, and files that no log
    starts from.

    A file exists before it is registered. `is_at_work` returns True for a run's folder and a writer that may be
    about to register one. `bases` returns a run's registered files. A damaged file has no run, and stays.
    """
    return {
        blob.key: blob.mark
        for blob in root.list()
        if not is_at_work(blob.key.partition("/")[0], _writer(blob.key))
        and (blob.is_unfinished or _is_orphan(root, blob.key, bases))
    }


def _writer(key: str) -> str:
    """Return the writer of a file, with any suffix of its name removed."""
    return key.rpartition("/")[2].partition("-")[2].partition(SUFFIX)[0]


def _is_orphan(root: Blobs, key: str, bases: Callable[[RunId], frozenset[str]]) -> bool:
    try:
        run = read_metadata(root, key)["run"]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError):
        return False
    return key not in bases(RunId(run))
