"""Processes die while passes of many cycles are open: nothing changes, and no part counts twice.

Cycles and the least part of a pass are so short here that each step runs one slice of one pass.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from cotrain_store.failpoints import FAILPOINTS
from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.messages.ids import RequestId, RunId, run_of
from cotrain_store.settings.worker import pool_of
from tests.faults.conftest import TALLIES
from tests.faults.host import MODEL, Host
from tests.faults.invariants import Ending
from tests.faults.orders import Nursery
from tests.faults.scenarios import POLL_S
from tests.faults.traffic import Call, Program, a_pass
from tests.faults.trial import trial
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

POOL = pool_of(MODEL)
#: The least there may be of a micro-batch, and a datum, of which it holds one: a slice.
MICRO_BATCH_TOKENS, DATUM_TOKENS = 256, 200
RUNS = 3
#: Requests of a run before its large passes: what of these is under way when faults are chosen does not matter.
SMALL = 9
#: A step in which a large pass is for the fourth time: one slice of it ran at least, and three at most.
NTH = 4
#: At each of these dies a process in the middle of a pass of its own.
FOREGROUND = (
    "worker.before_run", "worker.after_run", "worker.before_commit", "worker.after_commit",
    "scheduler.before_plan", "scheduler.after_plan",
)  # fmt: skip
#: The worker's other threads are at these, or a new worker; a step it dies over has no pass open when it runs again.
BACKGROUND = (
    "snapshot.before_write", "worker.entered", "worker.replayed",
    *(name for name in FAILPOINTS if name.startswith(("snapshot.", "weights.", "optimizer."))),
)  # fmt: skip
#: The thread that is about to die waits first, while the worker goes on: what a step that crashed ended is open again.
HELD_S = 0.3
STEP = Call("optim_step", {"adam_params": {"learning_rate": 1e-2, "beta2": 0.95, "eps": 1e-8}})


def programs(passes: int, slices: int) -> list[Program]:
    """Draw runs whose large passes follow one another, with a step and a save behind every third."""
    return [_program(random.Random(f"divided/{number}"), passes, slices) for number in range(RUNS)]


def _program(draw: random.Random, passes: int, slices: int) -> Program:
    small = [a_pass(draw, "forward_backward", [5]) for _ in range(SMALL)]
    large = []
    for number in range(passes):
        route = ("forward_backward", "forward_backward", "forward")[number % 3]
        large.append(a_pass(draw, route, [DATUM_TOKENS] * slices))
        if number % 3 == 2:
            large += [STEP, Call("save_weights", {"path": f"s{number}"})]
    return Program(4, draw.randrange(1 << 30), [small, large], end=[STEP], samples=0)


def seq_of_pass(number: int) -> int:
    """Return the place in its run of a large pass."""
    return SMALL + 1 + number + 2 * (number // 3)


def open_requests(host: Host) -> set[str]:
    """Name the passes that are open, by the log and by the cycles' records."""
    found = set()
    with host.store() as store:
        records = [json.loads(each) for each in store.lrange(fleet_keys.cycles(POOL), 0, -1)]
        for run in _created(host.moments()):
            begun = store.hget(run_keys.log(POOL, RunId(run)), "begun")
            rows = [row for one in records for row in one["runs"] if row["run"] == run]
            ran = [row for row in rows if row["tokens"]]  # the newest comes first
            if begun and not ran[0]["ops"]:
                found.add(f"{run}:{begun.decode().partition(':')[0]}")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_slices(small_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nursery]:
    """Where processes with small micro-batches come from."""
    async with Nursery(small_model, micro_batch_tokens=str(MICRO_BATCH_TOKENS)) as opened:
        request.config.stash.setdefault(TALLIES, []).append(opened.tally)
        yield opened


async def calm(nursery: Nursery, folder: Path, asked: Sequence[Program]) -> Ending:
    """Play all of it with every pass in one cycle."""
    (folder / "calm").mkdir()
    outcome = await trial(nursery, folder / "calm", asked)
    assert outcome.violations == []
    assert outcome.ending
    return outcome.ending


async def test_death_in_the_middle_of_a_pass_changes_nothing_and_counts_no_part_twice(
    small_slices: Nursery, folder: Path
) -> None:
    asked = programs(passes=len(FOREGROUND), slices=7)
    left: dict[str, str] = {}  # failpoint -> the request in whose middle a process dies there
    missed = []

    def note(host: Host) -> None:
        for at, request in list(left.items()):
            if host.count(at, request) >= NTH:
                del left[at]
                if request not in open_requests(host):
                    missed.append(at)

    async def disturb(host: Host) -> None:
        await until(lambda: len(_created(host.moments())) == RUNS, POLL_S)
        host.kill("scheduler", signal.SIGSTOP)
        run = min(_created(host.moments()))
        left.update({at: f"{run}:{seq_of_pass(n)}" for n, at in enumerate(FOREGROUND)})
        faults = ",".join(f"{at}~{request}=kill@{NTH}" for at, request in left.items())
        for name in ("w0", "scheduler"):
            host.restart(name, FAILPOINTS=faults)
        await until(lambda: len(host.deaths) == 2, POLL_S)
        host.before_restart = lambda _: note(host)
        await asyncio.Event().wait()

    outcome = await trial(
        small_slices, folder, asked, expected=await calm(small_slices, folder, asked),
        disturb=disturb, crowded=True,
    )  # fmt: skip
    assert outcome.violations == []
    assert (left, missed) == ({}, [])
    assert outcome.killed == {"w0": 1 + 4, "scheduler": 1 + 2}
    assert outcome.ending
    tokens = sum(5 * SMALL + len(FOREGROUND) * 7 * DATUM_TOKENS for _ in asked)
    assert outcome.ending.counted["tokens"] == outcome.ending.counted["training_tokens"] == tokens


@pytest.mark.faults
async def test_death_in_the_background_of_an_open_pass_changes_nothing(
    small_slices: Nursery, folder: Path
) -> None:
    """At each moment again and again until a pass was open."""
    asked, left = programs(passes=36, slices=8), list(BACKGROUND)

    def aim(host: Host) -> None:
        at, is_start = left[0], left[0] in ("worker.entered", "worker.replayed")
        nth = host.count(at) + (1 if is_start else 2)
        actions = ["kill"] if is_start else [f"sleep:{HELD_S}", "kill"]
        host.change("w0", FAILPOINTS=",".join(f"{at}={action}@{nth}" for action in actions))

    def note(host: Host) -> None:
        if left and open_requests(host):
            del left[0]
        if left:
            aim(host)
        else:
            host.change("w0", FAILPOINTS="")

    def begin(host: Host) -> None:
        aim(host)
        host.before_restart = lambda _: note(host)

    async def disturb(host: Host) -> None:
        await until(lambda: len(_created(host.moments())) == RUNS, POLL_S)
        host.before_restart = lambda _: begin(host)
        host.kill("w0")
        await asyncio.Event().wait()

    outcome = await trial(
        small_slices, folder, asked, expected=await calm(small_slices, folder, asked),
        disturb=disturb, crowded=True,
    )  # fmt: skip
    assert outcome.violations == []
    assert left == []


def _created(moments: Sequence[str]) -> set[str]:
    """Name the runs whose making was answered."""
    answers = (line.split() for line in moments if line.startswith("api.before_answer"))
    return {run_of(RequestId(answer[2])) for answer in answers if answer[2].endswith(":0:0")}
