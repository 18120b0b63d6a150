"""The adapters on a vLLM server: each under a name of its own, the longest unused unloaded for the next.

A name is the digest of what the folder holds, so that a name never means other weights: vLLM's
prefix cache knows adapters by name, and an overwritten one would be served stale keys and values.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cotrain_workers.sampling.vllm.client import VllmUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cotrain_workers.sampling.vllm.adapter_copies import AdapterCopies
    from cotrain_workers.sampling.vllm.client import VllmServer


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
