"""A whole server on one host: Redis, API, scheduler and workers, each restarted whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import redis as redis_client

from cotrain_scheduler.planner import QUANTUM_TOKENS
from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command
from cotrain_store.redis_client.connection import SyncConnection
from tests.faults.orders import Nursery
from tests.support.object_store import BadNetwork, SeaweedFS
from tests.support.plain_http import NO_TLS
from tests.support.waiting import until

#: One key per tenant.
KEYS = tuple(f"tml-faults{number}_secret-of-faults" for number in range(8))
MODEL = "tiny"
PATIENCE_S = 300.0
#: Delay before a process that ended is restarted.
RESTART_S = 0.02
REDIS = "redis"
#: Exit statuses of a process that starts while Redis or the object store is unavailable; `Host`
#: restarts it.
NO_STORE = {1, 3}
START_S = 60.0
TIDY_S = 120.0
#: Lines of each process's log, in the report of a server that is stuck.
ACCOUNT_LINES = 120
#: Signal on which a process prints the stacks of its threads (`nursery.become`).
SHOW_STACKS = signal.SIGUSR1


class Stuck(TimeoutError):
    """A process, or the whole server, did not respond within PATIENCE_S."""


@dataclass(frozen=True)
class Death:
    """End of a process that was not asked to stop."""

    name: str
    status: int
    store_was_away: bool
    lived_s: float
    at_s: float = field(default_factory=time.time)

    @property
    def is_fault(self) -> bool:
        """Return True if it crashed (invariant I8), and did not merely start without a store."""
        is_excused = self.store_was_away and self.status in NO_STORE and self.lived_s < START_S
        return self.status not in (0, -signal.SIGKILL) and not is_excused


@dataclass
class Kept:
    """One process, restarted until it is stopped."""

    name: str
    run: str | Sequence[str]
    environment: Mapping[str, str]
    pid: int = 0
    stopping: bool = False
    task: asyncio.Task[None] | None = None

    def shall_run(self) -> bool:
        """Return True unless it is asked to stop, which may happen at any `await`."""
        return not self.stopping


@dataclass
class Host:
    """The processes of one server below `folder`, and the ends of those that crashed."""

    nursery: Nursery
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    workers: Sequence[str] = ("w0",)
    long_poll_s: float = 10.0
    snapshot_ops: int = 3
    """Number of requests of a run after which a worker writes a snapshot."""
    quantum_tokens: int = QUANTUM_TOKENS
    """Token quantum of a tenant per turn in a cycle."""
    objects: SeaweedFS | None = None
    """Object store for blobs, if they are not in `folder`.

    Then each process has its own data folder, as on its own host.
    """
    network: BadNetwork | None = None
    """Network between the processes and the object store."""
    deaths: list[Death] = field(default_factory=list)
    before_restart: Callable[[str], None] = lambda _: None
    """Callback with the name of a process that ended, before it is restarted."""
    address: str = ""
    _kept: dict[str, Kept] = field(default_factory=dict)
    _retired: list[Kept] = field(default_factory=list)
    _redis_up: asyncio.Event = field(default_factory=asyncio.Event)
    _redis_downs: int = 0
    _deadline_passed: bool = False

    @property
    def redis_url(self) -> str:
        """URL of Redis' unix socket, whose path is short enough."""
        return f"unix://{self.folder}/r.sock"

    @property
    def _downs(self) -> tuple[int, int]:
        """Return the number of outages of each store, Redis and the object store."""
        return self._redis_downs, self.network.struck if self.network else 0

    @property
    def _ours(self) -> list[str]:
        """Names of all processes but Redis, in the order in which they were started."""
        return [name for name in self._kept if name != REDIS]

    @property
    def reached(self) -> Path:
        """File in which failpoints record that they were reached."""
        return self.folder / "reached"

    async def __aenter__(self) -> Self:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "redis").mkdir(exist_ok=True)
        port, listener = await self.nursery.ask("listen")
        self.address = f"http://127.0.0.1:{port}"
        socket = Path(self.redis_url.removeprefix("unix://"))
        self._keep(REDIS, redis_command(find_redis_binary(), self.folder / "redis", socket), {})
        await self._redis_up.wait()
        for worker in self.workers:
            self.add_worker(worker, worker)
        self.add_scheduler("scheduler")
        run = f"cotrain_server --listen-fd {listener} --long-poll-s {self.long_poll_s:g}"
        self._keep("api", run, self._environment("api", API_KEYS=",".join(KEYS)))
        await self.until_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._deadline_passed = True
        self._redis_up.set()  # so that waiting tasks find that the host stops
        for kept in (everybody := [*self._kept.values(), *self._retired]):
            kept.stopping = True
        while running := [kept for kept in everybody if kept.task and not kept.task.done()]:
            for kept in running:  # its pid may become known at any moment
                self.nursery.tell("signal", pid=kept.pid, signal=int(signal.SIGKILL))
            await asyncio.wait([kept.task for kept in running if kept.task], timeout=0.1)

    def add_worker(self, name: str, worker_id: str, **settings: str) -> None:
        """Start a worker under a name of this host."""
        self._keep(name, f"cotrain_workers --snapshot-ops {self.snapshot_ops}", self._environment(
            name, BASE_MODEL=f"{MODEL}={self.nursery.model}", WORKER_ID=worker_id, TORCH_THREADS="1",
            OFFLINE="true", DEVICE="cpu", KV_CACHE_TOKENS="4096",
        ) | {f"COTRAIN_{key}": value for key, value in settings.items()})  # fmt: skip
        self.workers = (*(one for one in self.workers if one != name), name)

    def add_scheduler(self, name: str) -> None:
        """Start one more scheduler."""
        run = f"cotrain_scheduler --quantum-tokens {self.quantum_tokens}"
        self._keep(name, run, self._environment(name))

    def retire(self, name: str) -> asyncio.Task[None]:
        """Stop restarting a process. Return the task that ends when it has ended."""
        kept = self._kept.pop(name)
        kept.stopping = True
        self.workers = [one for one in self.workers if one != name]
        self._retired.append(kept)
        assert kept.task
        return kept.task

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the current process of this name, if there is one."""
        if name == REDIS:
            self._redis_up.clear()
            self._redis_downs += 1
        if name in self._kept:  # absent between its end and its start, when all are upgraded
            self.nursery.tell("signal", pid=self._kept[name].pid, signal=int(number))

    def restart(self, name: str, **settings: str) -> None:
        """Kill a process, and restart it with other settings."""
        self.change(name, **settings)
        self.kill(name)

    def change(self, name: str, **settings: str) -> None:
        """Change the settings of a process from its next start on."""
        kept = self._kept[name]
        own = {f"COTRAIN_{key}": value for key, value in settings.items()}
        kept.environment = {**kept.environment, **own}

    def pid(self, name: str) -> int:
        """Return the pid of the current process of this name, or of the retired one."""
        return next(k.pid for k in [*self._kept.values(), *self._retired] if k.name == name)

    def count(self, failpoint: str, about: str = "") -> int:
        """Count how often a failpoint was reached, optionally for one object."""
        return sum(line.startswith(f"{failpoint} ") and about in line for line in self.moments())

    def moments(self) -> list[str]:
        """List the failpoints that any process reached, in order."""
        return self.reached.read_text().splitlines() if self.reached.exists() else []

    async def calm(self) -> None:
        """Drain and restart all processes but Redis, without failpoints, in the order of an
        upgrade."""
        self.settings = {k: v for k, v in self.settings.items() if k != "FAILPOINTS"}
        for name in self._ours:
            kept = self._kept[name]
            await self._end(name, signal.SIGTERM)
            environment = {k: v for k, v in kept.environment.items() if k != "COTRAIN_FAILPOINTS"}
            self._keep(name, kept.run, environment)
        await self.until_ready()

    async def stop(self) -> None:
        """Drain and stop all processes but Redis, the ones that accept requests first."""
        for name in reversed(self._ours):
            await self._end(name, signal.SIGTERM)

    async def tidy(self, is_tidy: Callable[[], bool]) -> None:
        """Start a worker that deletes unreferenced files at once.

        Stop it when it is done or after TIDY_S.
        """
        if is_tidy():
            return
        # otherwise the lease of an earlier sweeper would last for a minute
        with self.store() as store:
            for lease in store.scan_iter("cotrain:*sweeper"):
                store.delete(lease)
        self.add_worker("sweeper", "sweeper", ORPHAN_AGE_S="0")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIDY_S):
                await until(is_tidy, look_every_s=0.05)
        await self._end("sweeper", signal.SIGTERM)

    def store(self) -> SyncConnection:
        """Open a connection that bypasses the server."""
        return redis_client.Redis.from_url(self.redis_url)

    async def until_ready(self) -> None:
        """Wait until the server is ready to train, or raise `Stuck`."""
        until, last = time.monotonic() + PATIENCE_S, "no answer"
        async with httpx.AsyncClient(base_url=self.address, verify=NO_TLS) as http:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.get("/readyz")
                    if answer.status_code == 200:
                        return
                    last = answer.text
                await asyncio.sleep(0.05)
        raise Stuck(f"not ready for {PATIENCE_S:g} s: {last}")

    def log_of(self, name: str) -> str:
        """Return the log of a process."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def account(self) -> str:
        """Return the last log lines of each process, and the stacks of its threads."""
        for name in self._ours:
            self.kill(name, SHOW_STACKS)
        await asyncio.sleep(1)
        logs = {name: self.log_of(name).splitlines()[-ACCOUNT_LINES:] for name in self._kept}
        return "\n".join(f"== {name}\n" + "\n".join(lines) for name, lines in logs.items())

    def _environment(self, process: str, **own: str) -> dict[str, str]:
        shared = {
            "REDIS_URL": self.redis_url, "DATA_DIR": str(self.folder), "DISK_RESERVE_BYTES": "0",
            "FAILPOINTS_LOG": str(self.reached),
        }  # fmt: skip
        variables: dict[str, str] = {}
        if self.objects:
            variables = self.objects.variables(self.network.endpoint if self.network else "")
            shared["DATA_DIR"] = str(self.folder / f"host-of-{process}")
        return variables | {f"COTRAIN_{name}": value for name, value in (shared | own | dict(self.settings)).items()}

    def _keep(self, name: str, run: str | Sequence[str], environment: Mapping[str, str]) -> None:
        kept = self._kept[name] = Kept(name, run, environment)
        kept.task = asyncio.create_task(self._keep_running(kept))

    async def _keep_running(self, kept: Kept) -> None:
        log = str(self.folder / "logs" / f"{kept.name}.log")
        while kept.shall_run():
            if kept.name != REDIS:
                await self._redis_up.wait()
            if self._deadline_passed:
                return
            downs, since = self._downs, time.monotonic()
            kept.pid = await self.nursery.ask("start", run=kept.run, environment=dict(kept.environment), log=log)
            if not kept.shall_run():  # a stop was requested before its pid was known
                self.nursery.tell("signal", pid=kept.pid, signal=int(signal.SIGTERM))
            ended = self.nursery.ended(kept.pid)
            if kept.name == REDIS:
                await self._until_redis_answers(ended)
            status = await ended
            if kept.name == REDIS:
                self._redis_up.clear()
            lived_s = time.monotonic() - since
            if not _is_in_order(kept, status, lived_s):
                self._note(Death(kept.name, status, downs != self._downs, lived_s))
                await asyncio.sleep(RESTART_S)

    def _note(self, death: Death) -> None:
        if not self._deadline_passed:
            self.deaths.append(death)
            self.before_restart(death.name)

    async def _until_redis_answers(self, ended: asyncio.Future[int]) -> None:
        with self.store() as store:
            while not ended.done():
                with contextlib.suppress(redis_client.ConnectionError):
                    if store.ping():
                        self._redis_up.set()
                        return
                await asyncio.sleep(0.01)

    async def _end(self, name: str, number: int) -> None:
        kept = self._kept[name]
        kept.stopping = True
        if kept.pid:
            self.nursery.tell("signal", pid=kept.pid, signal=int(number))
        assert kept.task
        try:
            await asyncio.wait_for(asyncio.shield(kept.task), PATIENCE_S)
        except TimeoutError:
            raise Stuck(f"{name} did not end within {PATIENCE_S:g} s of signal {number}") from None
        del self._kept[name]  # until here, it could be killed


def _is_in_order(kept: Kept, status: int, lived_s: float) -> bool:
    """Return True if a process ended as requested. A newly forked process cannot drain."""
    has_just_begun = status == -signal.SIGTERM and lived_s < START_S
    return kept.stopping and (status == 0 or has_just_begun)
