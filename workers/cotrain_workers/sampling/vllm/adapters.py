"""Adapters on a vLLM server, and copies of adapters on this host for it."""

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
from cotrain_workers.checkpoints.peft_folder import LayoutOf, read_folder, remove_folder, write_folder
from cotrain_workers.sampling.vllm.client import (
    AdapterUnknown,
    VllmServer,
    VllmUnavailable,
)

log = structlog.get_logger()


class VllmAdapters:
    """Adapters on the server, loaded on demand, at most `most`. For one event loop.

    The name of an adapter is the digest of its folder's content, so a name never refers to other weights. An
    overwritten adapter would get stale keys and values, because vLLM's prefix cache identifies adapters by name.
    """

    def __init__(self, server: VllmServer, most: int, copies: AdapterCopies | None = None) -> None:
        self._server = server
        self._copies = copies
        self._most = most
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # least recently used first
        self._loading = asyncio.Lock()

    @asynccontextmanager
    async def loaded(self, path: Path) -> AsyncIterator[str]:
        """Keep the adapter of a folder loaded inside the context. Yields its model name for requests.

        After AdapterUnknown inside, the next context loads it again. Raises the errors of `VllmServer.load` and
        `AdapterCopies.fetch`.
        """
        name = path.name
        while name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:
                    await self._evict()
                    if self._copies:
                        await asyncio.to_thread(self._copies.fetch, name, frozenset(self._loaded))
                    await self._server.load(name, path)
                    self._loaded[name] = _Loaded()
        adapter = self._loaded[name]
        self._loaded.move_to_end(name)
        adapter.users += 1
        adapter.idle.clear()
        try:
            yield name
        except AdapterUnknown:
            self._loaded.pop(name, None)
            raise
        finally:
            adapter.users -= 1
            if not adapter.users:
                adapter.idle.set()

    async def drop(self, name: str) -> None:
        """Unload an adapter once no sequence uses it. Idempotent."""
        adapter = self._loaded.pop(name, None)
        if adapter:
            await self._unload(name, adapter)

    async def _evict(self) -> None:
        """Unload the least recently used adapters until one more fits.

        If all are in use, the least recently requested one accepts no new sequences until it is loaded
        again. A request therefore waits at most until that adapter's current sequences are done.
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
        with contextlib.suppress(VllmUnavailable):  # a restarted server has no adapters
            await self._server.unload(name)


@dataclass
class _Loaded:
    """Adapter on the server, and the number of sequences that use it now."""

    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterCopies:
    """Copies of adapters of an object store in `folder`, because a vLLM server reads files. Thread-safe.

    They have at most `limit_bytes`. The least recently used are removed.
    """

    def __init__(self, adapters: Blobs, folder: Path, limit_bytes: int, base_model: str, layout_of: LayoutOf) -> None:
        """Empty the folder, which belongs to this process. Earlier copies are made again on demand."""
        self._adapters = adapters
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._base_model = base_model
        self._layout_of = layout_of
        self._bytes: OrderedDict[str, int] = OrderedDict()  # by digest, least recently used first
        self._copying = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)

    def fetch(self, digest: str, loaded: Collection[str] = ()) -> None:
        """Copy an adapter to the folder, in the layout of `write_folder`, unless it is there. Blocks.

        Adapters `loaded` on the server are kept, even above the limit, because the server may read them again.

        Raises:
            FolderUnreadable: the adapter is missing or damaged.
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
