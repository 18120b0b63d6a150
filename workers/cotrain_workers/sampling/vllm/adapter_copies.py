"""Copies of adapters that lie in an object store, as folders of this host: a vLLM server reads files."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import structlog

from cotrain_store.blobs.durable_files import make_folder
from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import read_folder, remove_folder, write_folder

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from cotrain_store.blobs.protocol import Blobs
    from cotrain_workers.checkpoints.peft_folder import LayoutOf

log = structlog.get_logger()


class AdapterCopies:
    """At most `limit_bytes` of them in `folder`, the longest unused removed for the next. Any thread may ask."""

    def __init__(
        self, adapters: Blobs, folder: Path, limit_bytes: int, base_model: str, layout_of: LayoutOf
    ) -> None:
        """Begin with an empty folder, which is this process's own: what was copied before is copied again."""
        self._adapters = adapters
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._base_model = base_model
        self._layout_of = layout_of
        self._bytes: OrderedDict[str, int] = OrderedDict()  # by digest, the longest unused first
        self._copying = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)

    def fetch(self, digest: str, loaded: Collection[str] = ()) -> None:
        """Have the adapter of a digest in the folder, where `write_folder` puts it; blocks while it is copied.

        Those that are `loaded` on the server stay, even above the limit: it may have to read them again.

        Raises:
            FolderUnreadable: there is none, or it is damaged.
            OSError: it cannot be copied now.
        """
        with self._copying:
            if digest not in self._bytes:
                weights = read_folder(self._adapters, digest, self._layout_of)
                self._free(weights.bytes, loaded)
                layout = self._layout_of(weights.spec)
                written = write_folder(Folder(self._folder), weights, layout, self._base_model)
                self._bytes[digest] = written.size
                log.info("adapter_copied", digest=digest, size=written.size)
            self._bytes.move_to_end(digest)

    def _free(self, size: int, loaded: Collection[str]) -> None:
        for digest in [digest for digest in self._bytes if digest not in loaded]:
            if sum(self._bytes.values()) + size <= self._limit_bytes:
                return
            remove_folder(Folder(self._folder), digest)
            del self._bytes[digest]
