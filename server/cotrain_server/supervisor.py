"""Run a whole server on this host: Redis, API, scheduler and one worker per base model.

The same processes that run in containers, each in its own session. Started in the order they need
one another, ended in the reverse: first whoever takes new work, last what keeps it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from cotrain_server import variables
from cotrain_server.children import Child, Program
from cotrain_server.folder import DataFolder, FolderInUse
from cotrain_server.probe import probe
from cotrain_server.readiness import write_troubles
from cotrain_store.connection import CONNECTION_LOST, check_store, open_connection
from cotrain_store.embedded import find_redis_binary, redis_command
from cotrain_store.errors import StoreUnavailable
from cotrain_store.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

API_GRACE_S = 10.0
SCHEDULER_GRACE_S = 5.0
#: A worker ends its cycle and writes recovery copies; what it does not manage is replayed.
WORKER_GRACE_S = 60.0
REDIS_GRACE_S = 30.0
#: Processes of a server that was just killed need a moment to be gone.
LOCK_PATIENCE_S = 5.0
BACKLOG = 4096
POLL_S = 0.05
READY_POLL_S = 0.2


@dataclass(frozen=True)
class Plan:
    """What to serve, decided from the command line."""

    base_models: tuple[str, ...]
    """Hub ids, folders, or NAME=FOLDER."""
    host: str
    port: int
    """0 takes a free one."""
    data_dir: Path
    redis_url: str | None
    """None: start our own Redis."""
    api_keys: tuple[str, ...]
    """None given and none known: one is made."""
    accept_data_loss: bool
    given: Mapping[str, str]
    """Settings given by flag, by variable name without its prefix."""


@dataclass(frozen=True)
class Announcement:
    """What the operator needs to know once everything runs."""

    address: str
    new_key: str | None
    """Made just now, because there was none; only its hash is kept."""


@dataclass
class Supervisor:
    """The processes of one server."""

    plan: Plan
    say: Callable[[str], None]
    announce: Callable[[Announcement], None]
    _stages: list[list[Child]] = field(default_factory=list)
    _kept: list[asyncio.Task[None]] = field(default_factory=list)
    _troubles: dict[str, str] = field(default_factory=dict)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Serve until SIGINT or SIGTERM; a second one does not wait for anything.

        Raises:
            FolderInUse, UnsafeFolder, NoRedisFound, OSError: the server cannot start at all.
            UnsafeRedis, InvalidKey: it must not.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)
        folder = DataFolder(self.plan.data_dir)
        lock = await _locked(folder)
        write_troubles(folder.path, {})
        with _listen(self.plan.host, self.plan.port) as listener:
            starting = asyncio.create_task(self._start(folder, lock, listener))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                await stopping
            finally:
                starting.cancel()
                stopping.cancel()
                listener.close()
                await self._drain()
                os.close(lock)

    async def _start(self, folder: DataFolder, lock: int, listener: socket.socket) -> None:
        redis_url = self.plan.redis_url or f"unix://{folder.socket()}"
        programs = Programs(self.plan, folder, redis_url, lock, listener.fileno())
        if self.plan.redis_url is None:
            self._add(folder, [programs.redis()])
        new_key = await _prepare_store(redis_url, self.plan)
        self._add(folder, programs.workers())
        self._add(folder, [programs.scheduler()])
        self._add(folder, [programs.api()])
        port = listener.getsockname()[1]
        await _ready(_url(_reachable(self.plan.host), port))
        self.announce(Announcement(_url(self.plan.host, port), new_key))

    def _add(self, folder: DataFolder, programs: Sequence[Program]) -> None:
        stage = [
            Child(program, folder, self.say, partial(self._note, folder)) for program in programs
        ]
        self._stages.append(stage)
        self._kept += [asyncio.create_task(child.keep()) for child in stage]

    async def _drain(self) -> None:
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        for outcome in await asyncio.gather(*self._kept, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        self.say("stopped")

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self.say("stopping; press Ctrl-C again to stop at once")
            self._stop.set()
            return
        for child in (child for stage in self._stages for child in stage):
            child.kill()

    def _note(self, folder: DataFolder, process: str, trouble: str | None) -> None:
        self._troubles.pop(process, None)
        if trouble is not None:
            self._troubles[process] = trouble
        write_troubles(folder.path, self._troubles)


@dataclass(frozen=True)
class Programs:
    """How each process is started."""

    plan: Plan
    folder: DataFolder
    redis_url: str
    lock: int
    listener: int

    def redis(self) -> Program:
        """Make the embedded Redis; without its supervisor it ends by itself, in good order."""
        command = redis_command(find_redis_binary(), self.folder.redis, self.folder.socket())
        return Program(
            "redis",
            command,
            variables.environment(frozenset(), {}),
            REDIS_GRACE_S,
            death_signal=signal.SIGTERM,
            pass_fds=(self.lock,),
        )

    def workers(self) -> list[Program]:
        """Make one worker per base model."""
        return [
            self._ours(
                f"worker-w{number}",
                "cotrain_workers",
                variables.WORKER,
                WORKER_GRACE_S,
                BASE_MODEL=base_model,
                WORKER_ID=f"w{number}",
            )
            for number, base_model in enumerate(self.plan.base_models)
        ]

    def scheduler(self) -> Program:
        """Make the scheduler."""
        return self._ours("scheduler", "cotrain_scheduler", variables.SCHEDULER, SCHEDULER_GRACE_S)

    def api(self) -> Program:
        """Make the API. It listens on our socket, so that a restart of it refuses no connection."""
        names = ",".join(base_model.partition("=")[0] for base_model in self.plan.base_models)
        api = self._ours(
            "api",
            "cotrain_server",
            variables.API,
            API_GRACE_S,
            BASE_MODELS=names,
            HOST=self.plan.host,
            PORT=str(self.plan.port),
            LISTEN_FD=str(self.listener),
        )
        return replace(api, pass_fds=(self.lock, self.listener))

    def _ours(
        self, name: str, module: str, known: frozenset[str], grace_s: float, **own: str
    ) -> Program:
        shared = {
            "REDIS_URL": self.redis_url,
            "DATA_DIR": str(self.folder.path),
            "ACCEPT_DATA_LOSS": str(self.plan.accept_data_loss).lower(),
            # Registered by us already, and no other process needs to hold them.
            "API_KEYS": "",
        }
        # -P: a file of the folder we were started in must not be taken for a module.
        command = [sys.executable, "-P", "-m", module]
        given = {**self.plan.given, **shared, **own}
        return Program(
            name, command, variables.environment(known, given), grace_s, pass_fds=(self.lock,)
        )


async def _locked(folder: DataFolder) -> int:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return folder.lock()
        except FolderInUse:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


async def _prepare_store(redis_url: str, plan: Plan) -> str | None:
    """Wait for Redis, refuse an unsafe one, and see to it that there is an API key.

    Returns a key made just now, because there was none.
    """
    connection = open_connection(redis_url)
    try:
        while True:
            with suppress(StoreUnavailable, *CONNECTION_LOST):
                await check_store(connection, accept_data_loss=plan.accept_data_loss)
                return await _prepare_keys(Tenants(connection), plan.api_keys)
            await asyncio.sleep(POLL_S)
    finally:
        await connection.aclose()


async def _prepare_keys(tenants: Tenants, given: Sequence[str]) -> str | None:
    for key in given:
        await tenants.register(key, "operator's key")
    return None if await tenants.list_keys() else await tenants.issue("first tenant")


async def _ready(url: str) -> None:
    while True:
        status, _ = await asyncio.to_thread(probe, f"{url}/readyz")
        if status == 200:
            return
        await asyncio.sleep(READY_POLL_S)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # not bound here


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
