"""Saved weights of this worker: used from memory at once, written to disk by a background thread.

A save copies an adapter to the host and commits; its files follow. Until they are durable its
weights are *unstored*: only this worker can use them, and a named save has no answer yet. If the
process crashes, the log makes them again. No log is therefore cut past an unstored save
(`first_unstored`).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import structlog

from cotrain_store.disk.sweep import ORPHAN_AGE_S, UnreferencedFiles
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId, WeightsRef, seq_of
from cotrain_store.messages.ops import OpKind, Step
from cotrain_store.messages.runs import WeightsRecord
from cotrain_store.weights import SavedWeights
from cotrain_workers.checkpoints.files import CheckpointFiles, Saved, WrittenFiles
from cotrain_workers.checkpoints.peft_folder import FolderUnreadable, LayoutOf, SumsUnusable, read_folder
from cotrain_workers.checkpoints.state_files import OptimizerUnreadable, read_optimizer
from cotrain_workers.engine.ops import HostOptimizer, HostWeights, WeightsMissing

log = structlog.get_logger()

#: Host memory for saved weights on disk, and for unstored saves. Above the latter, saves wait for
#: the disk.
MEMORY_BYTES = 2 * 1024**3
UNSTORED_BYTES = 8 * 1024**3
#: Delay in s before a failed write (most likely a full disk) is repeated.
RETRY_S = 5.0
#: Interval in s of looking for unstored weights of a crashed worker, whose successor this one may
#: be.
RELOAD_S = 2.0
#: Interval in s of looking for weights that are not in use.
SWEEP_S = 60.0
#: Interval in s of looking for files that no weights refer to.
LOOK_S = 3600.0
#: Result of a named save that cannot be made again.
LOST = "The checkpoint was lost before it was on disk, and its run cannot be replayed; save again."


@dataclass
class _Unstored:
    """Weights whose files may not be durable yet."""

    record: WeightsRecord
    saved: Saved | None  # None: made by a crashed process, and pending a replay
    writing: Future[WrittenFiles] | None = None
    retry_at: float = 0.0
    accepted_at: float | None = None
    """Acceptance of a named save of this process, in s since 1970; its answer is pending."""


class WeightsStore:
    """Saved weights that this worker can provide. For one thread; only the writing is on another."""

    def __init__(
        self,
        saved: SavedWeights,
        files: CheckpointFiles,
        layout_of: LayoutOf,
        memory_bytes: int = MEMORY_BYTES,
        unstored_bytes: int = UNSTORED_BYTES,
        orphan_age_s: float = ORPHAN_AGE_S,
        count_answered: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`memory_bytes` limits weights that are also on disk, `unstored_bytes` the others.

        Unstored weights stay in any case; above the limit further saves wait
        (`has_capacity_for`). Files are removed once they have been unreferenced for
        `orphan_age_s`. `count_answered` receives the seconds from the acceptance of a named save
        to its answer.
        """
        self._saved = saved
        self._files = files
        self._count_answered = count_answered
        self.layout_of = layout_of
        self._unstored_limit = unstored_bytes
        self._unstored: dict[WeightsRef, _Unstored] = {}
        self._given_up: set[WeightsRef] = set()
        self._cache = WeightsCache(memory_bytes)
        self._stored: dict[WeightsRef, WeightsRecord] = {}
        self._file_sweep = FileSweep(files, saved, orphan_age_s)
        self._reload_at = self._sweep_at = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.reload()

    def reload(self) -> None:
        """Load the list of unstored weights: of a predecessor, or of a commit whose answer was lost."""
        for record in self._saved.unstored():
            if record.ref not in self._given_up:
                self._unstored.setdefault(record.ref, _Unstored(record, None))

    @property
    def unstored(self) -> int:
        """Number of saves that are not on disk yet. Any thread may read it."""
        return len(self._unstored)

    @property
    def unstored_bytes(self) -> int:
        """Bytes in memory that wait for the disk. Any thread may read it."""
        return sum(_size(entry.saved) for entry in list(self._unstored.values()))

    def has_capacity_for(self, saves: Iterable[Saved]) -> bool:
        """Return True if memory has space for these saves and another; False while the disk is too far behind."""
        return self.unstored_bytes + sum(map(_size, saves)) <= self._unstored_limit

    def put(self, record: WeightsRecord, saved: Saved, accepted_at: float | None = None) -> None:
        """Add the weights of a committed save, with the acceptance time of a named one. Idempotent."""
        entry = self._unstored.setdefault(record.ref, _Unstored(record, None))
        entry.accepted_at = accepted_at or entry.accepted_at
        if entry.saved is None:
            entry.saved = saved
            self._write(entry)

    def put_again(self, ref: WeightsRef, saved: Saved) -> None:
        """Add weights that a replay made again, if they are still unstored."""
        if ref in self._unstored:
            self.put(self._unstored[ref].record, saved)

    def is_lost(self, ref: WeightsRef) -> bool:
        """Return True if only a replay of their run can restore these weights."""
        return ref in self._unstored and self._unstored[ref].saved is None

    def lost(self) -> list[WeightsRecord]:
        """Return the weights that were lost with a process before they were durable."""
        return [entry.record for entry in self._unstored.values() if entry.saved is None]

    def give_up(self, ref: WeightsRef) -> None:
        """Abandon weights that no replay can restore: a named save fails."""
        log.error("weights_lost", weights=ref)
        self._saved.fail_save(ref, LOST)
        self._unstored.pop(ref, None)
        self._given_up.add(ref)

    def first_unstored(self, run: RunId) -> int | None:
        """Return the first save of a run whose weights are unstored: its log is needed from there on."""
        of_run = [ref for ref, entry in self._unstored.items() if entry.record.run == run]
        return min(map(seq_of, of_run), default=None)

    def is_known(self, ref: WeightsRef) -> bool:
        """Return True if these weights exist; from then on `host` does not query the store."""
        if ref in self._unstored or ref in self._stored:
            return True
        record = self._saved.weights(ref)
        if record is None:
            return False
        # of a crashed worker, and this one may just have become its successor
        if not record.digest:
            self.reload()
            return ref in self._unstored
        self._stored[ref] = record
        return True

    def host(self, ref: WeightsRef) -> HostWeights:
        """Return the weights, from memory or from disk.

        Raises:
            WeightsMissing: they are in neither.
        """
        entry = self._unstored.get(ref)
        if entry and entry.saved:
            return entry.saved.weights
        if cached := self._cache.get(ref):
            return cached
        if not self.is_known(ref) or ref in self._unstored:
            raise WeightsMissing(ref)
        try:
            weights = read_folder(self._files.adapters, self._stored[ref].digest, self.layout_of)
        except FolderUnreadable as unreadable:
            log.error("weights_unreadable", weights=ref, reason=str(unreadable))
            reason = str(unreadable) if isinstance(unreadable, SumsUnusable) else ""
            raise WeightsMissing(ref, reason) from unreadable
        self._cache.put(ref, weights)
        return weights

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        """Return the optimizer state that was saved with the weights; None if they were saved
        without one.

        Raises:
            WeightsMissing: it is neither in memory nor on disk.
        """
        entry = self._unstored.get(ref)
        if entry and entry.saved:
            return entry.saved.optimizer
        record = self._saved.weights(ref)
        if record is None or not record.digest:
            raise WeightsMissing(ref)
        if not record.has_optimizer:
            return None
        try:
            return read_optimizer(self._files.optimizers, record.optimizer_digest, self.layout_of)
        except OptimizerUnreadable as unreadable:
            log.error("optimizer_unreadable", weights=ref, reason=str(unreadable))
            raise WeightsMissing(ref) from unreadable

    def stored(self, ref: WeightsRef) -> WeightsRecord | None:
        """Return the record of stored weights, for a server that reads their files; None while they are being written.

        Raises:
            WeightsMissing: they do not exist, and will not.
        """
        if not self.is_known(ref):
            raise WeightsMissing(ref)
        return self._stored.get(ref)

    def maintain(self) -> list[WeightsRef]:
        """Publish completed writes, retry failed ones, and sweep periodically.

        Returns weights that no request can use any more.
        """
        self._finish_writes()
        now = time.monotonic()
        self._file_sweep.maintain(now)
        if now >= self._reload_at:
            self._reload_at = now + RELOAD_S
            self.reload()
        if now < self._sweep_at:
            return []
        self._sweep_at = now + SWEEP_S
        return self.sweep()

    def sweep(self) -> list[WeightsRef]:
        """Drop weights that no request can use any more, and return them."""
        self.reload()
        unused = [record.ref for record in self._saved.unused_weights()]
        for ref in (*unused, *self._given_up):
            self._saved.forget_weights(ref)
            self._cache.drop(ref)
            self._stored.pop(ref, None)
        if unused:
            log.info("weights_forgotten", count=len(unused))
        return unused

    def await_writes(self, until: float) -> None:
        """Wait for the writes in progress, until a time of the monotonic clock."""
        writing = [entry.writing for entry in self._unstored.values() if entry.writing]
        wait(writing, max(0.0, until - time.monotonic()))

    def drain(self, deadline_s: float) -> None:
        """Wait for the writes in progress; the remaining weights are made again from the log."""
        self.await_writes(time.monotonic() + deadline_s)
        self._finish_writes()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._file_sweep.stop()

    def _write(self, entry: _Unstored) -> None:
        assert entry.saved is not None
        layout = self.layout_of(entry.saved.weights.spec)
        entry.writing = self._writer.submit(self._files.write, entry.record.ref, entry.saved, layout)

    def _finish_writes(self) -> None:
        now = time.monotonic()
        for ref, entry in list(self._unstored.items()):
            if entry.writing is None:
                if entry.saved and now >= entry.retry_at:
                    self._write(entry)
            elif entry.writing.done():
                self._finish_write(ref, entry, entry.writing)

    def _finish_write(self, ref: WeightsRef, entry: _Unstored, writing: Future[WrittenFiles]) -> None:
        try:
            written = writing.result()
        except OSError as failed:
            log.error("weights_not_written", weights=ref, reason=str(failed))
            entry.writing, entry.retry_at = None, time.monotonic() + RETRY_S
            return
        assert entry.saved is not None
        with self._files.removing:
            if not self._files.confirm(ref, entry.saved, written):
                log.error("weights_removed", weights=ref)
                self._write(entry)
                return
            failpoint("weights.before_stored", ref)
            is_wanted = self._saved.mark_stored(ref, written.digest, written.size, written.optimizer_digest)
        failpoint("weights.stored", ref)
        # Only now: while Redis is unavailable they stay written and unstored.
        del self._unstored[ref]
        if not is_wanted:
            return  # dropped, or their commit found that their name was in use
        self._stored[ref] = replace(entry.record, digest=written.digest)
        self._cache.put(ref, entry.saved.weights)
        if entry.accepted_at is not None:
            self._count_answered(time.time() - entry.accepted_at)
        log.info("weights_stored", weights=ref, digest=written.digest, size=written.size)


def _size(saved: Saved | None) -> int:
    """Return the bytes of memory of a save."""
    if saved is None:
        return 0
    moments = [saved.optimizer.m, saved.optimizer.v] if saved.optimizer else []
    return saved.weights.bytes + sum(moment.nbytes for moment in moments)


class SaveBackpressure:
    """Acceptance of saves by one worker, for its loop and its planner.

    It delays saves, and nothing else, while too many of them wait in memory for the disk. The
    planner receives it before the commit that fills the memory, so it plans no further save. A
    step that contains a save all the same (most likely a crashed worker's) waits as a whole.
    """

    def __init__(self, weights: WeightsStore, send_heartbeat: Callable[[], None]) -> None:
        """`send_heartbeat` publishes `accepts_saves`."""
        self._weights = weights
        self._send_heartbeat = send_heartbeat
        self._published = True
        self._waiting_cycle = 0
        self.accepts_saves = True
        """True if another save may be planned. Any thread may read it."""

    def publish(self, saves: Iterable[Saved] = ()) -> None:
        """Publish to the planner if memory accepts further saves after these. Idempotent.

        Raises the heartbeat's errors; the next call publishes it then.
        """
        self.accepts_saves = self._weights.has_capacity_for(saves)
        if self.accepts_saves != self._published:
            self._send_heartbeat()
            self._published = self.accepts_saves
            log.info("save_backpressure_changed", accepts_saves=self._published)

    def admits(self, step: Step) -> bool:
        """Return True if a step may run now. Accepted saves are never rejected, but may have to wait."""
        has_save = any(op.kind is OpKind.SAVE for op in step.ops)
        is_admitted = not has_save or self._weights.has_capacity_for(())
        if not is_admitted and step.cycle != self._waiting_cycle:
            self._waiting_cycle = step.cycle
            log.warning("step_waits_for_saves", cycle=step.cycle)
        return is_admitted


class WeightsCache:
    """Stored weights in host memory, at most `limit_bytes`. The least recently used are evicted."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._weights: OrderedDict[WeightsRef, HostWeights] = OrderedDict()

    def get(self, ref: WeightsRef) -> HostWeights | None:
        """Return cached weights, now the most recently used, or None."""
        if ref not in self._weights:
            return None
        self._weights.move_to_end(ref)
        return self._weights[ref]

    def put(self, ref: WeightsRef, weights: HostWeights) -> None:
        """Cache weights while there is memory."""
        self._weights[ref] = weights
        kept_bytes = sum(each.bytes for each in self._weights.values())
        while kept_bytes > self._limit_bytes:
            _, oldest = self._weights.popitem(last=False)
            kept_bytes -= oldest.bytes

    def drop(self, ref: WeightsRef) -> None:
        """Drop weights, if cached."""
        self._weights.pop(ref, None)


class FileSweep:
    """Unreferenced files of saved weights seen by one worker. `now` is a time of the monotonic clock."""

    def __init__(self, files: CheckpointFiles, saved: SavedWeights, orphan_age_s: float) -> None:
        self._files = files
        self._saved = saved
        self._age_s = orphan_age_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._looking: Future[None] | None = None
        self._look_at = 0.0
        self._lease = None if files.blobs.folder else saved.sweep_lease()
        self.unwanted = UnreferencedFiles(orphan_age_s)

    def maintain(self, now: float) -> None:
        """Sweep if it is due. Raises the error of the last sweep, and sweeps again then."""
        if self._lease and not self._lease.is_mine(now):
            self.unwanted = UnreferencedFiles(self._age_s)
        elif self._looking is None and now >= self._look_at:
            self._looking = self._thread.submit(self._files.remove_orphans, self._saved, self.unwanted, now)
        elif self._looking and self._looking.done():
            looking, self._looking = self._looking, None
            looking.result()
            self._look_at = now + (LOOK_S if self.unwanted.is_empty else self._age_s)

    def stop(self) -> None:
        """Stop sweeping; a removal in progress completes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
