"""The adapters on a vLLM server: each under a name of its own, the longest unused unloaded for the next.

A name is the digest of what the folder holds, so that a name never means other weights: vLLM's
prefix cache knows adapters by name, and an overwritten one would be served stale keys and values.

Copies of adapters that lie in an object store, as folders of this host: a vLLM server reads files.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from cotrain_store.blobs.folder import Folder, make_folder
from cotrain_store.blobs.protocol import Blobs
from cotrain_workers.checkpoints.peft_folder import (
    LayoutOf,
    read_folder,
    remove_folder,
    write_folder,
)
from cotrain_workers.sampling.vllm.client import VllmServer, VllmUnavailable

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


@dataclass
class _Loaded:
    """An adapter on the server, and how many sequences are being generated with it."""

    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class VllmAdapters:
    """Loads adapters when they are asked for, and keeps at most `most`; for one event loop."""

    def __init__(self, server: VllmServer, most: int, copies: AdapterCopies | None = None) -> None:
        self._server = server
        self._copies = copies
        self._most = most
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # the longest unused first
        self._loading = asyncio.Lock()

    @asynccontextmanager
    async def loaded(self, path: Path) -> AsyncIterator[str]:
        """Have the adapter of a folder loaded for as long as this lasts; gives the name to ask for.

        Raises what `VllmServer.load` and `copy` raise.
        """
        name = path.name
        while name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:
                    await self._evict()
                    await self.copy(name)
                    await self._server.load(name, path)
                    self._loaded[name] = _Loaded()
        adapter = self._loaded[name]
        self._loaded.move_to_end(name)
        adapter.users += 1
        adapter.idle.clear()
        try:
            yield name
        finally:
            adapter.users -= 1
            if not adapter.users:
                adapter.idle.set()

    async def copy(self, name: str) -> None:
        """Have the files of an adapter where the server reads them. Twice is harmless.

        Raises what `AdapterCopies.fetch` raises.
        """
        if self._copies:
            await asyncio.to_thread(self._copies.fetch, name, frozenset(self._loaded))

    def forget(self, name: str | None = None) -> None:
        """Note that the server does not have an adapter any more, or none of them."""
        for each in [name] if name else list(self._loaded):
            self._loaded.pop(each, None)

    async def drop(self, name: str) -> None:
        """Unload an adapter once no sequence uses it. Twice is harmless."""
        adapter = self._loaded.pop(name, None)
        if adapter:
            await self._unload(name, adapter)

    async def _evict(self) -> None:
        """Unload the longest unused while there are too many.

        If all are in use, the one whose last user came first takes no new ones until it is loaded
        again, in order: so no request waits longer than those take that are being generated.
        """
        while len(self._loaded) >= self._most:
            idle = (name for name, adapter in self._loaded.items() if not adapter.users)
            name = next(idle, next(iter(self._loaded)))
            adapter = self._loaded.pop(name)
            try:
                await self._unload(name, adapter)
            except asyncio.CancelledError:
                self._loaded.setdefault(name, adapter)
                raise

    async def _unload(self, name: str, adapter: _Loaded) -> None:
        if adapter.users:
            await adapter.idle.wait()
        with contextlib.suppress(VllmUnavailable):  # then it is unloaded for good
            await self._server.unload(name)
