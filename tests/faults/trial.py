"""One trial: a server, a few runs that train on it, a fault, and a check of the result."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotrain_scheduler.planner import QUANTUM_TOKENS
from cotrain_store.redis_client.connection import CONNECTION_LOST
from tests.faults.fairness import turns
from tests.faults.host import MODEL, REDIS, Death, Host
from tests.faults.invariants import (
    SCAN_COUNT,
    Ending,
    PageRequest,
    Watch,
    accepted_from_replaced,
    differences,
    unexpected,
)
from tests.faults.orders import Nursery
from tests.faults.traffic import Played, Player, Program, Refused, client_of
from tests.support.object_store import BadNetwork, SeaweedFS

Running = Coroutine[Any, Any, None]
Disturb = Callable[[Host], Running]

#: Time limit of a trial; a slower one has lost a request (I1).
LIMIT_S = 400.0
#: Cycles too short for the work of all tenants.
CROWDED = {"CLOCK_PERIOD_S": "0.001"}
CROWDED_QUANTUM_TOKENS = 8


@dataclass
class Outcome:
    """Result of a trial."""

    ending: Ending | None = None
    violations: list[str] = field(default_factory=list)
    deaths: Sequence[Death] = ()
    reached: Mapping[str, int] = field(default_factory=dict)
    """Number of times each failpoint was reached, over all processes."""
    passed_over: int = 0
    """Number of times that a cycle held not all pending work of a run."""
    told_to_wait: Counter[int] = field(default_factory=Counter)
    """Number of rejections of clients, by status code."""
    logs: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def killed(self) -> Counter[str]:
        """Return the number of deaths by process."""
        return Counter(death.name for death in self.deaths)


async def trial(
    nursery: Nursery,
    folder: Path,
    programs: Sequence[Program],
    *,
    seed: int = 0,
    expected: Ending | None = None,
    disturb: Disturb | None = None,
    limit_s: float = LIMIT_S,
    settings: Mapping[str, str] | None = None,
    workers: Sequence[str] = ("w0",),
    excused: tuple[str, ...] = (),
    long_poll_s: float = 10.0,
    snapshot_ops: int = 3,
    crowded: bool = False,
    objects: SeaweedFS | None = None,
    network: BadNetwork | None = None,
) -> Outcome:
    """Play programs on a new server below `folder` while `disturb` runs. Stop the server and check
    it.

    Violations that start with a prefix in `excused` are ignored.
    """
    outcome = Outcome()
    quantum_tokens = CROWDED_QUANTUM_TOKENS if crowded else QUANTUM_TOKENS
    given = {**(settings or {}), **(CROWDED if crowded else {})}
    if objects:
        given["BLOBS"] = objects.new_prefix()
    async with Host(
        nursery, folder, given, workers, long_poll_s, snapshot_ops, quantum_tokens, objects, network
    ) as host:
        watch = Watch(host.redis_url, MODEL)
        watching = asyncio.create_task(watch.run())
        clients = [client_of(host.address, seed * 100 + n, n) for n in range(len(programs))]
        players = [Player(*each) for each in zip(clients, programs, strict=True)]
        try:
            async with asyncio.timeout(limit_s):
                await _beside([player.play() for player in players], disturb and disturb(host))
                await host.calm()
                played = await asyncio.gather(*(player.finish() for player in players))
            await host.stop()
            await _look(host, played, outcome, crowded=crowded)
        except Refused as refused:
            outcome.violations.append(f"I1 {refused}")
        except TimeoutError as late:
            outcome.violations.append(f"I1 {str(late) or f'not over after {limit_s:g} s'}")
            print(await host.account())
        finally:
            watching.cancel()
            for client in clients:
                outcome.told_to_wait += client.told_to_wait
                await client.http.aclose()
    reached = host.moments()
    outcome.violations += watch.violations + unexpected(host.deaths) + accepted_from_replaced(reached)
    if expected and outcome.ending:
        outcome.violations += differences(expected, outcome.ending)
    outcome.violations = [one for one in outcome.violations if not one.startswith(excused)]
    outcome.deaths = host.deaths
    outcome.reached = Counter(line.partition(" ")[0] for line in reached)
    outcome.logs = {path.stem: path.read_text(errors="replace") for path in (folder / "logs").iterdir()}
    nursery.tally.add(outcome.killed, outcome.violations)
    return outcome


async def _look(host: Host, played: Sequence[Played], outcome: Outcome, *, crowded: bool) -> None:
    """Check a stopped server after its unreferenced files have been deleted."""
    with host.store() as store:
        look = PageRequest(store, host.folder, MODEL)

        def is_tidy() -> bool:
            if host.objects:
                host.objects.copy_out(host.settings["BLOBS"], host.folder)
            return not look.leftovers()

        await host.tidy(is_tidy)
        outcome.ending = look.ending(played)
        outcome.violations += look.violations()
        outcome.violations += [f"I5 nobody refers to {path}" for path in look.leftovers()]
        if crowded:
            accepted = {one.run: one.accepted for one in played}
            restarted_s = [death.at_s for death in host.deaths if death.name == "scheduler"]
            seen = turns(look.cycles(), accepted, host.quantum_tokens, restarted_s)
            outcome.violations += seen.violations
            outcome.passed_over = seen.passed_over


async def _beside(plays: Sequence[Running], disturbance: Running | None) -> None:
    """Wait for all plays during a disturbance. Raise the first exception."""
    playing = asyncio.gather(*plays)
    tasks: set[asyncio.Future[Any]] = {playing}
    if disturbance:
        tasks.add(asyncio.create_task(disturbance))
    try:
        while not playing.done():
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()


def random_kills(seed: int, mean_s: float = 0.5, most: int = 40) -> Disturb:
    """Kill random processes at random intervals, the worker most often; `most` in total."""

    async def kill(host: Host) -> None:
        draw = random.Random(seed)
        victims = [*[*host.workers] * 3, *["api", "scheduler"] * 2, REDIS]
        while len(host.deaths) < most:
            await asyncio.sleep(draw.expovariate(1 / mean_s))
            name = draw.choice(victims)
            if name not in host.workers or not near_blame(host):
                host.kill(name)

    return kill


def store_faults(seed: int, objects: SeaweedFS, network: BadNetwork) -> Disturb:
    """Interrupt the network to the object store at random intervals, and sometimes kill its server."""

    async def restart() -> None:
        with network.failing("away"):
            await asyncio.to_thread(objects.restart)

    async def fail(_: Host) -> None:
        draw = random.Random(seed)
        while True:
            await asyncio.sleep(draw.expovariate(1))
            fault = draw.choice(["refuse", "cut", "away", "stall"] * 2 + ["killed"])
            if fault == "killed":
                # it is restarted even after all programs have been played
                await asyncio.shield(restart())
            else:
                with network.failing(fault):
                    await asyncio.sleep(draw.uniform(0.1, 1.0))

    return fail


def at_once(*disturbances: Disturb) -> Disturb:
    """Run several disturbances concurrently."""

    async def disturb(host: Host) -> None:
        await asyncio.gather(*(one(host) for one in disturbances))

    return disturb


def near_blame(host: Host) -> bool:
    """Return True if one more crash could be attributed to a request, which is not the cause here."""
    with contextlib.suppress(*CONNECTION_LOST), host.store() as store:
        for name in store.scan_iter("cotrain:{*}:starts*", SCAN_COUNT):
            if any(int(count) >= 1 for count in store.hvals(name)):
                return True
        for name in store.scan_iter("cotrain:{*}:claimed:*", SCAN_COUNT):
            for request in store.lrange(name, 0, -1):
                deaths = store.hmget(f"cotrain:sample:{request.decode()}", ["starts", "deaths"])
                if any(int(count or 0) >= 2 for count in deaths):
                    return True
        return False
    return True
