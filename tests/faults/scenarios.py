"""Fault scenarios, by name.

Each must change nothing in the server, and must change something in a mutant.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotrain_store.disk.spool import SpoolRef
from tests.faults.host import Host
from tests.faults.host_clock import age_files
from tests.faults.invariants import Ending
from tests.faults.orders import Nursery
from tests.faults.traffic import Program, a_pass, programs, without_samples
from tests.faults.trial import LIMIT_S, Outcome, trial
from tests.support.waiting import until

PROGRAMS = without_samples(programs(1))
#: Many passes of one size: the allowed lead of one run over another is small compared with all its
#: requests.
ALIKE = [
    Program(4, number, [[a_pass(random.Random(number), "forward", [6, 6])] * 30], [], samples=0) for number in range(4)
]
POLL_S = 0.02
#: A heartbeat lasts 10 s; a worker id with an expired heartbeat may be taken over by another host.
BEAT_S = 11.0
#: A fenced scheduler is on standby again after this time.
STANDS_BY_S = 1.0


@dataclass(frozen=True)
class Scenario:
    """Settings of the server, a disturbance during the runs, and their time limit."""

    settings: Mapping[str, str] = field(default_factory=dict)
    disturb: Callable[[Host], Coroutine[Any, Any, None]] | None = None
    limit_s: float = LIMIT_S
    long_poll_s: float = 10.0
    snapshot_ops: int = 3
    crowded: bool = False
    programs: Sequence[Program] = field(default_factory=lambda: PROGRAMS)

    async def run(self, nursery: Nursery, folder: Path, expected: Ending) -> Outcome:
        """Run the scenario."""
        return await trial(
            nursery, folder, self.programs, expected=expected, disturb=self.disturb, limit_s=self.limit_s,
            settings=self.settings, long_poll_s=self.long_poll_s,
            snapshot_ops=self.snapshot_ops,
            crowded=self.crowded,
        )  # fmt: skip


def killed_at(*moments: str, snapshot_ops: int = 3) -> Scenario:
    """Return a scenario that kills at moments, `name@nth`."""
    faults = ",".join(moment.replace("@", "=kill@") for moment in moments)
    return Scenario({"FAILPOINTS": faults}, snapshot_ops=snapshot_ops)


async def until_reached(host: Host, failpoint: str, count: int) -> None:
    """Wait until a failpoint was reached `count` times."""
    await until(lambda: host.count(failpoint) >= count, POLL_S)


async def _place_taken(host: Host) -> None:
    """Pause a worker in a step, start another process that takes its id and trains on, resume the
    first."""
    await until_reached(host, "worker.before_run", 4)
    await asyncio.sleep(BEAT_S)
    for lock in (host.folder / "run").glob("worker-*"):
        lock.unlink()  # as if the other process were on another host
    host.add_worker("second", "w0")
    await until_reached(host, "worker.after_commit", 8)
    ended = host.retire("w0")
    host.nursery.tell("signal", pid=host.pid("w0"), signal=int(signal.SIGCONT))
    await asyncio.wait({ended}, timeout=LIMIT_S)


async def _lead_taken(host: Host) -> None:
    """Pause the leading scheduler, start another one that plans, resume the first."""
    await until_reached(host, "scheduler.before_plan", 4)
    host.add_scheduler("second")
    await until_reached(host, "scheduler.after_plan", 8)
    host.nursery.tell("signal", pid=host.pid("scheduler"), signal=int(signal.SIGCONT))
    await asyncio.Event().wait()


async def _lead_given_back(host: Host) -> None:
    """Pause and replace the leading scheduler, then kill its successor before all work is planned.

    The first leads again, with stale data in memory.
    """
    await until_reached(host, "scheduler.before_plan", 4)
    host.add_scheduler("second")
    await until_reached(host, "scheduler.after_plan", 6)
    # Stop its planning: on a fast machine all work would be done before the first scheduler finds
    # that it was fenced.
    host.kill("second", signal.SIGSTOP)
    host.nursery.tell("signal", pid=host.pid("scheduler"), signal=int(signal.SIGCONT))
    await asyncio.sleep(STANDS_BY_S)
    host.retire("second")
    host.nursery.tell("signal", pid=host.pid("second"), signal=int(signal.SIGKILL))
    await asyncio.Event().wait()


async def _all_at_once(host: Host) -> None:
    """Plan nothing between the creation of the runs and the last of their requests."""
    await until_reached(host, "api.before_answer", len(ALIKE))
    host.kill("scheduler", signal.SIGSTOP)
    sent = sum(1 + len(calls) for program in ALIKE for calls in program.parts)
    await until_reached(host, "api.after_submit", sent)
    host.kill("scheduler", signal.SIGCONT)
    await asyncio.Event().wait()


async def _power_lost(host: Host) -> None:
    """Lose unsynced writes of the spool, and the worker, as in a power cut."""

    def lose(name: str) -> None:
        moment = "spool.before_sync "
        reached = [line for line in host.moments() if line.startswith(moment)]
        if name == "api" and reached:
            at = SpoolRef.parse(reached[-1].split()[2])
            os.truncate(host.folder / "spool" / at.segment, at.offset)
            host.kill("w0")

    host.before_restart = lose
    await asyncio.Event().wait()


async def _make_old(host: Host) -> None:
    """Set the times of all files back by two days, repeatedly."""
    while True:
        age_files(host.folder)
        await asyncio.sleep(POLL_S)


async def _tear_copies(host: Host) -> None:
    """Corrupt the newest snapshot of every run, once, after its worker was killed."""

    def tear(name: str) -> None:
        if name != "w0":
            return
        host.before_restart = lambda _: None
        with host.store() as store:
            for log in store.scan_iter("cotrain:{*}:log:*"):
                file = store.hget(log, "snapfile")
                if file:
                    spoil(host.folder / "snapshots" / file.decode())

    host.before_restart = tear
    await asyncio.Event().wait()


def spoil(path: Path) -> None:
    """Change bytes at the end of a file, where its tensors are."""
    content = bytearray(path.read_bytes())
    content[-64:] = bytes(byte ^ 1 for byte in content[-64:])
    path.write_bytes(content)


SCENARIOS = {
    "killed after a commit": killed_at(
        "worker.after_commit@4", "worker.after_commit@7", snapshot_ops=1000
    ),
    "killed before a commit": killed_at("worker.before_commit@4", "worker.before_commit@7"),
    "killed behind a recovery copy": killed_at(
        *(f"snapshot.registered@{nth}" for nth in (2, 4, 6, 8, 10, 12))
    ),
    "killed in a recovery copy": killed_at("snapshot.half_written@3", "snapshot.half_written@6"),
    "recovery copies are torn": Scenario({"FAILPOINTS": "worker.after_commit=kill@8"}, _tear_copies),
    "killed before a request is logged": killed_at("api.before_submit@20", "api.before_submit@40"),
    "a commit that takes its time": Scenario(
        {"FAILPOINTS": "worker.before_commit=sleep:0.3@4,worker.before_commit=sleep:0.3@7"}
    ),
    "no client asks twice": Scenario(limit_s=38, long_poll_s=40.0),
    "a place is taken": Scenario({"FAILPOINTS": "worker.before_run=stop@4"}, _place_taken),
    "a full house": Scenario({}, _all_at_once, crowded=True, programs=ALIKE),
    "the lead is taken": Scenario({"FAILPOINTS": "scheduler.before_plan=stop@4"}, _lead_taken),
    "the lead is taken and given back": Scenario(
        {"FAILPOINTS": "scheduler.before_plan=stop@4"}, _lead_given_back, limit_s=120, snapshot_ops=1000
    ),
    "power is lost before the spool is synced": Scenario(
        {
            # Accepted work is still in progress at the power cut: a commit needs no body any more.
            "FAILPOINTS": ",".join([
                *(f"spool.before_sync={fault}@{nth}" for nth in (1, 2, 3) for fault in ("sleep:0.5", "kill")),
                *(f"worker.before_commit=sleep:1.5@{nth}" for nth in range(1, 10)),
            ]),
        },
        _power_lost,
        snapshot_ops=1000,
    ),
    "files look two days old": Scenario(
        {
            # Long enough for a sweep to find a body that is written and not yet accepted.
            "FAILPOINTS": ",".join(f"api.before_submit=sleep:0.3@{nth}" for nth in range(4, 60, 2)),
            "ORPHAN_AGE_S": "0.2",
        },
        _make_old,
    ),
}  # fmt: skip
