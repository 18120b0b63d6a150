"""Power cut of a whole server: every process ends, and unsynced data is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.runs import external_folder
from cotrain_store.redis_client.connection import SyncConnection
from tests.faults.host import MODEL, REDIS, Host
from tests.faults.invariants import PageRequest
from tests.faults.orders import Nursery
from tests.faults.power_disk import Disk
from tests.faults.trial import Disturb, near_blame
from tests.support.redis_server import EmbeddedRedis

#: By run: how many requests are accepted, committed and covered by a snapshot.
Places = Mapping[str, tuple[int, ...]]

LOOK_S = 0.01


class Mains(Nursery):
    """A nursery whose children share one disk and lose power together."""

    def __init__(self, model: Path, disk: Disk) -> None:
        super().__init__(model)
        self.disk = disk
        self._is_on = asyncio.Event()
        self._is_on.set()
        self._alive: set[int] = set()

    @override
    async def __aenter__(self) -> Mains:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.disk.environment.items():
                patch.setenv(name, value)
            await super().__aenter__()
        return self

    @override
    async def ask(self, do: str, **order: Any) -> Any:
        await self._is_on.wait()
        answer = await super().ask(do, **order)
        if do == "start":
            self._alive.add(answer)
            self.ended(answer).add_done_callback(lambda _: self._alive.discard(answer))
        return answer

    async def off(self) -> None:
        """Kill all children, and start none until `on`."""
        self._is_on.clear()
        async with self._order:  # earlier orders have been executed
            alive = list(self._alive)
        for pid in alive:
            self.tell("signal", pid=pid, signal=int(signal.SIGKILL))
        await asyncio.gather(*(asyncio.shield(self.ended(pid)) for pid in alive))

    def on(self) -> None:
        """Allow children to start again."""
        self._is_on.set()


@dataclass
class Cutter:
    """Power cuts of one server, with a check of its data before anything restarts."""

    mains: Mains
    seed: int | None = None
    """None: only synced data survives a cut.

    Otherwise a different part of the unsynced data survives each cut.
    """
    cuts: int = 0
    broken: list[str] = field(default_factory=list)
    """Promises that a cut has broken."""

    async def cut(self, host: Host) -> None:
        """Cut the power once. When cancelled, it completes first, with the power on again."""
        await asyncio.shield(asyncio.create_task(self._cut(host)))

    async def _cut(self, host: Host) -> None:
        before = await _places_of(host)
        self.cuts += 1
        host.kill(REDIS)  # the other processes wait until it answers
        await self.mains.off()
        try:
            self.broken += await asyncio.to_thread(self._change_disk, host.folder, before)
        finally:
            self.mains.on()

    def _change_disk(self, folder: Path, before: Places) -> list[str]:
        draw = None if self.seed is None else random.Random(f"{self.seed}/{self.cuts}")
        self.mains.disk.cut(folder, draw)
        return [f"cut {self.cuts}: {broken}" for broken in broken_promises(folder, before)]


def cuts_at_random(cutter: Cutter, times: int, mean_s: float = 0.5) -> Disturb:
    """Cut the power at random times."""

    async def disturb(host: Host) -> None:
        draw = random.Random(cutter.seed)
        while cutter.cuts < times:
            await asyncio.sleep(draw.expovariate(1 / mean_s))
            if not near_blame(host):
                await cutter.cut(host)
                await host.until_ready()

    return disturb


def cuts_at(cutter: Cutter, moments: Iterable[str]) -> Disturb:
    """Cut the power whenever one of these failpoints stops its process."""

    async def disturb(host: Host) -> None:
        left = set(moments)
        while left:
            await asyncio.sleep(LOOK_S)
            lines = host.moments()
            if now := left & {line.partition(" ")[0] for line in lines}:
                left -= now
                await cutter.cut(host)

    return disturb


async def _places_of(host: Host) -> Places:
    while True:
        with contextlib.suppress(redis_client.ConnectionError), host.store() as store:
            return places(store)
        await asyncio.sleep(LOOK_S)  # Redis is still starting


def places(store: SyncConnection) -> Places:
    """Read the progress of each run. Redis returns only synced data."""
    names = sorted(store.scan_iter("cotrain:{*}:log:*"))
    fields = ("next", "done", "snap")
    return {name.decode(): tuple(int(value or -1) for value in store.hmget(name, fields)) for name in names}


def broken_promises(folder: Path, before: Places) -> list[str]:
    """List references of Redis' log in `folder` that its files do not fulfil, and progress in
    `before` that the log has lost."""
    with server_below(folder) as store:
        return list(_broken(store, folder, before))


@contextlib.contextmanager
def server_below(folder: Path) -> Iterator[SyncConnection]:
    """Start a Redis on a copy of its data in `folder`."""
    with EmbeddedRedis() as server:
        server.kill()
        shutil.copytree(folder / "redis", server.socket.parent, dirs_exist_ok=True)
        server.restart()
        with redis_client.Redis.from_url(server.url) as store:
            yield store


def _broken(store: SyncConnection, folder: Path, before: Places) -> Iterator[str]:
    now = places(store)
    for run, place in before.items():
        if any(after < then for after, then in zip(now.get(run, (-1,) * 3), place, strict=True)):
            yield f"I1 {run} went back from {place} to {now.get(run)}"
    for wrong in PageRequest(store, folder, MODEL).violations():
        if "at rest" not in wrong:
            yield wrong
    prefix = redis_keys.weights(WeightsRef(""))
    for name in sorted(store.scan_iter(f"{prefix}*")):
        if store.type(name) == b"hash":
            fields = ("digest", "optimizer", "record", "size")  # other fields are bytes
            row = {
                field: value.decode() for field, value in zip(fields, store.hmget(name, fields), strict=True) if value
            }
            yield from _wrong_weights(WeightsRef(name.decode().removeprefix(prefix)), row, folder)


def _wrong_weights(ref: WeightsRef, row: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Report stored weights whose files differ from the counted ones."""
    digest, optimizer = row.get("digest"), row.get("optimizer")
    if not digest:
        return  # not stored yet: a replay of the log makes them again
    files = list((folder / "weights" / digest[:2] / digest).glob("*"))
    if optimizer:
        files += (folder / "optimizers" / optimizer[:2]).glob(f"{optimizer}.*")
    if json.loads(row["record"]).get("external"):
        export = folder / "external" / external_folder(ref)
        files += export.glob("*.age")
        with contextlib.suppress(OSError, ValueError):
            if json.loads((export / "owner.json").read_text())["weights"] == ref:
                ref = WeightsRef("")
        if ref:
            yield f"I5 {ref}: nobody owns its export"
    size = sum(file.stat().st_size for file in files)
    if size != int(row["size"]):
        yield f"I5 {digest}: its files have {size} bytes, not {row['size']}"
