"""Look now and then, in a thread, for files of saves that may go: the adapters' are opened, one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cotrain_store.disk.orphan_ages import Unwanted

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cotrain_store.weights.saved_weights import SavedWeights
    from cotrain_workers.checkpoints.files import CheckpointFiles

LOOK_S = 3600.0


class FileSweep:
    """What one worker has seen unwanted. `now` is of the monotonic clock."""

    def __init__(self, files: CheckpointFiles, saved: SavedWeights, orphan_age_s: float) -> None:
        self._files = files
        self._saved = saved
        self._age_s = orphan_age_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._looking: Future[None] | None = None
        self._look_at = 0.0
        self._lease = None if files.blobs.folder else saved.sweep_lease()
        self.unwanted = Unwanted(orphan_age_s)

    def maintain(self, now: float) -> None:
        """Look if it is time to; raises what the last look raised, and looks again then."""
        if self._lease and not self._lease.is_mine(now):
            self.unwanted = Unwanted(self._age_s)
        elif self._looking is None and now >= self._look_at:
            self._looking = self._thread.submit(
                self._files.remove_orphans, self._saved, self.unwanted, now
            )
        elif self._looking and self._looking.done():
            looking, self._looking = self._looking, None
            looking.result()
            self._look_at = now + (LOOK_S if self.unwanted.is_empty else self._age_s)

    def stop(self) -> None:
        """Look no more; what is being removed goes to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
