"""Supervisor of a whole server on this host: Redis, API, scheduler, and the workers of each base model.

It runs the same processes as containers do, each in its own session. They start in the order of their dependencies and
stop in reverse: first the processes that accept new work, last Redis.
"""

import asyncio
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cotrain_server.probe import probe, write_problems
from cotrain_server.supervisor.data_folder import DataFolder, FolderInUse
from cotrain_server.supervisor.logs import follow, mend_log
from cotrain_server.supervisor.process import CannotServe, ManagedProcess, Program
from cotrain_server.supervisor.programs import Plan, Programs
from cotrain_store.blobs.opening import claim_blobs
from cotrain_store.errors import StoreUnavailable
from cotrain_store.monitoring.worker_exits import store_exit
from cotrain_store.process_start import ANY_ADDRESS, address, listen
from cotrain_store.redis_client.connection import CONNECTION_LOST, check_store, open_connection, open_sync_connection
from cotrain_store.tenants.api_keys import Tenants

#: Wait for the processes of a killed server to exit, in seconds.
LOCK_PATIENCE_S = 5.0
POLL_S = 0.05
READY_POLL_S = 0.2
LOGS_EVERY_S = 60.0
#: Normal duration of a start, without a message to the operator.
SILENCE_S = 10.0


@dataclass
class Supervisor:
    """Processes of one server."""

    plan: Plan
    say: Callable[[str], None]
    announce: Callable[[str, str | None], None]
    """Called after a complete start with the address, and a key if one was created. Only its hash is stored."""
    _stages: list[list[ManagedProcess]] = field(default_factory=list)
    _running: list[asyncio.Task[None]] = field(default_factory=list)
    _problems: dict[str, str] = field(default_factory=dict)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _refusal: str | None = None
    _was_ready: bool = False
    _owns_folder: bool = True

    async def run(self) -> None:
        """Serve until SIGINT or SIGTERM. A second signal stops at once.

        Raises:
            FolderInUse, UnsafeFolder, UnusableFolder, CannotListen, NoRedisFound: the server cannot
            start.
            UnsafeRedis: the server must not start.
            CannotServe: one of its processes cannot run, for a permanent reason.
        """
        self._handle_signals()
        folder = DataFolder(self.plan.data_dir)
        folder.check_writable()
        lock = await _locked(folder)
        write_problems(folder.path, {})
        self.say(f"everything is kept in {folder.path}, logs in {folder.logs}")
        with listen(self.plan.host, self.plan.port) as listener:
            starting = asyncio.create_task(self._start(folder, lock, listener))
            tidying = asyncio.create_task(_keep_logs_short(folder))
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                # `run_until_stopped` returns only if all processes must stop, or by a bug.
                await asyncio.wait({stopping, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                starting.cancel()
                stopping.cancel()
                tidying.cancel()
                listener.close()
                await self._drain()
                os.close(lock)
        if self._refusal:
            raise CannotServe(self._refusal)

    async def join(self) -> None:
        """Run only workers, of a server on another host, until SIGINT or SIGTERM. A second signal stops at once.

        Raises:
            UnusableFolder: no logs can be written.
            CannotServe: a worker refuses to start, for a permanent reason.
        """
        self._handle_signals()
        self._owns_folder = False
        folder = DataFolder(self.plan.data_dir)
        programs = Programs(self.plan, folder, self.plan.redis_url or "")
        following = self._start_workers(folder, programs, programs.workers(first_port=0))
        self.say(f"logs are in {folder.logs}; each worker loads its libraries first")
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stopping, *self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            following.cancel()
            stopping.cancel()
            await self._drain()
        if self._refusal:
            raise CannotServe(self._refusal)

    async def _start(self, folder: DataFolder, lock: int, listener: socket.socket) -> None:
        redis_url = self.plan.redis_url or f"unix://{folder.socket()}"
        programs = Programs(self.plan, folder, redis_url, lock, listener.fileno())
        if self.plan.redis_url is None:
            redis = programs.redis()
            await asyncio.to_thread(mend_log, folder, Path(redis.command[0]), self.say)
            self._add(folder, [redis])
        new_key = await _prepare_store(redis_url, self.plan, self.say)
        folder.write_metrics_targets(programs.metrics_targets())
        following = self._start_workers(folder, programs, programs.workers())
        self.say("each worker loads its libraries first, which takes some seconds")
        self._add(folder, [programs.scheduler()])
        self._add(folder, [programs.api()])
        port = listener.getsockname()[1]
        reachable = {"0.0.0.0": "127.0.0.1", ANY_ADDRESS: "::1"}  # noqa: S104  # not bound here
        url = f"http://{address(reachable.get(self.plan.host, self.plan.host), port)}"
        await _ready(url, self.say)
        following.cancel()
        self._was_ready = True
        self.announce(url, new_key)

    def _start_workers(self, folder: DataFolder, programs: Programs, workers: list[Program]) -> asyncio.Task[None]:
        """Start workers. The returned task prints the progress of their start until it is cancelled."""
        if gpu_notice := programs.gpu_notice():
            self.say(gpu_notice)
        logs = {worker.name: folder.new_lines(worker.name) for worker in workers}
        following = asyncio.create_task(follow(logs, self.say))
        self._add(folder, workers, programs.redis_url)
        return following

    def _add(self, folder: DataFolder, programs: Sequence[Program], redis_url: str = "") -> None:
        """Start programs. The exits of workers are stored in the Redis of `redis_url`."""
        stage = [
            ManagedProcess(
                program,
                folder,
                self.say,
                partial(self._report, folder),
                self._give_up,
                partial(store_exit, redis_url, *program.worker) if program.worker else None,
            )
            for program in programs
        ]
        self._stages.append(stage)
        self._running += [asyncio.create_task(child.run_until_stopped()) for child in stage]

    async def _drain(self) -> None:
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        for outcome in await asyncio.gather(*self._running, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        self.say("stopped")

    def _handle_signals(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self.say("stopping; press Ctrl-C again to stop at once")
            self._stop.set()
            return
        for child in (child for stage in self._stages for child in stage):
            child.kill()

    def _give_up(self, refusal: str) -> bool:
        """Stop all processes after one refused to start. After a complete start, ignore it, since the cause may pass."""
        if self._was_ready:
            return False
        self._refusal = self._refusal or refusal
        self._stop.set()
        return True

    def _report(self, folder: DataFolder, process: str, problem: str | None) -> None:
        if not self._owns_folder:
            return
        self._problems.pop(process, None)
        if problem is not None:
            self._problems[process] = problem
        write_problems(folder.path, self._problems)


async def _keep_logs_short(folder: DataFolder) -> None:
    while True:
        with suppress(OSError):  # no disk space for the copy; retried later
            await asyncio.to_thread(folder.put_logs_aside)
        await asyncio.sleep(LOGS_EVERY_S)


async def _locked(folder: DataFolder) -> int:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return folder.lock()
        except FolderInUse:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_S)


async def _prepare_store(redis_url: str, plan: Plan, say: Callable[[str], None]) -> str | None:
    """Wait for Redis, refuse an unsafe one, and ensure that an API key exists.

    Returns a key created during this call, if none existed.
    """
    connection = open_connection(redis_url)
    patient_until = time.monotonic() + SILENCE_S
    try:
        while True:
            try:
                await asyncio.to_thread(_claim_store, redis_url, plan)
                return None if plan.api_keys else await _first_key(Tenants(connection))
            except (StoreUnavailable, *CONNECTION_LOST) as error:
                reason = str(error)
            if time.monotonic() > patient_until:
                say(f"waiting: {reason}")
                patient_until = math.inf
            await asyncio.sleep(POLL_S)
    finally:
        await connection.aclose()


def _claim_store(redis_url: str, plan: Plan) -> None:
    with open_sync_connection(redis_url) as store:
        check_store(store, accept_data_loss=plan.accept_data_loss)
        claim_blobs(store, plan.data_dir, plan.blobs)


async def _first_key(tenants: Tenants) -> str | None:
    # A key in the settings of an earlier start is no longer valid.
    issued = [key for key in await tenants.list_keys() if not key.in_settings]
    return None if issued else await tenants.issue("first tenant")


async def _ready(url: str, say: Callable[[str], None]) -> None:
    """Wait until the server is ready. After SILENCE_S, print the reasons for the delay."""
    patient_until, reported = time.monotonic() + SILENCE_S, ""
    while True:
        status, body = await asyncio.to_thread(probe, f"{url}/readyz")
        if status == 200:
            return
        reasons = " ".join(json.loads(body)["reasons"]) if status == 503 else "No API answers."
        if reasons != reported and time.monotonic() > patient_until:
            say(f"not ready yet: {reasons}")
            reported = reasons
        await asyncio.sleep(READY_POLL_S)
