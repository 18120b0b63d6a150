"""Kills while passes of many cycles are open: nothing changes, and no part counts twice.

The cycles and the minimum slice are so short here that each step runs one slice of one pass.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from cotrain_store import redis_keys
from cotrain_store.failpoints import FAILPOINTS
from cotrain_store.messages.ids import RequestId, RunId, run_of
from cotrain_store.settings import pool_of
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
#: Minimum size of a micro-batch, and the size of a datum, of which a micro-batch holds one: a
#: slice.
MICRO_BATCH_TOKENS, DATUM_TOKENS = 256, 200
RUNS = 2
#: Requests of a run before its large passes. Their state at the time of the faults does not matter.
SMALL = 9
#: The fourth step with a large pass: at least one and at most three slices of it have run.
NTH = 4
#: At each of these failpoints, a process is killed in the middle of a separate pass.
FOREGROUND = (
    "worker.before_run", "worker.after_run", "worker.before_commit", "worker.after_commit",
    "scheduler.before_plan", "scheduler.after_plan",
)  # fmt: skip
#: Failpoints of the worker's other threads, or of a new worker. After a crash in its step, the open
#: pass is closed when the step runs again.
BACKGROUND = (
    "snapshot.before_write", "worker.entered", "worker.replayed",
    *(name for name in FAILPOINTS if name.startswith(("snapshot.", "weights.", "optimizer."))),
)  # fmt: skip
#: The thread to be killed waits first while the worker continues, so that a pass is open again
#: after a crashed step closed it.
HELD_S = 0.3
STEP = Call("optim_step", {"adam_params": {"learning_rate": 1e-2, "beta2": 0.95, "eps": 1e-8}})


def programs(passes: int, slices: int) -> list[Program]:
    """Draw runs of consecutive large passes, with a step and a save after every third."""
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
    """Return the seq of a large pass in its run."""
    return SMALL + 1 + number + 2 * (number // 3)


def open_requests(host: Host) -> set[str]:
    """Return the open passes, according to the log and the cycle records."""
    found = set()
    with host.store() as store:
        records = [json.loads(each) for each in store.lrange(redis_keys.cycles(POOL), 0, -1)]
        for run in _created(host.moments()):
            begun = store.hget(redis_keys.log(POOL, RunId(run)), "begun")
            rows = [row for one in records for row in one["runs"] if row["run"] == run]
            ran = [row for row in rows if row["tokens"]]  # newest first
            if begun and not ran[0]["ops"]:
                found.add(f"{run}:{begun.decode().partition(':')[0]}")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_slices(small_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nursery]:
    """Parent of processes with small micro-batches."""
    async with Nursery(small_model, micro_batch_tokens=str(MICRO_BATCH_TOKENS)) as opened:
        request.config.stash.setdefault(TALLIES, []).append(opened.tally)
        yield opened


async def calm(nursery: Nursery, folder: Path, asked: Sequence[Program]) -> Ending:
    """Play all programs with every pass in one cycle."""
    (folder / "calm").mkdir()
    outcome = await trial(nursery, folder / "calm", asked)
    assert outcome.violations == []
    assert outcome.ending
    return outcome.ending


@pytest.mark.parametrize("moments", [FOREGROUND[1::2], pytest.param(FOREGROUND, marks=pytest.mark.faults)])
async def test_a_kill_in_the_middle_of_a_pass_changes_nothing(
    moments: Sequence[str], small_slices: Nursery, folder: Path
) -> None:
    asked = programs(passes=len(moments), slices=5)
    left: dict[str, str] = {}  # failpoint -> the request in whose middle a process is killed there
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
        left.update({at: f"{run}:{seq_of_pass(n)}" for n, at in enumerate(moments)})
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
    killed = Counter("w0" if at.startswith("worker.") else "scheduler" for at in moments)
    assert outcome.killed == killed + Counter(("w0", "scheduler"))
    assert outcome.ending
    tokens = sum(5 * SMALL + len(moments) * 5 * DATUM_TOKENS for _ in asked)
    assert outcome.ending.counted["tokens"] == outcome.ending.counted["training_tokens"] == tokens


@pytest.mark.faults
async def test_a_kill_in_the_background_of_an_open_pass_changes_nothing(small_slices: Nursery, folder: Path) -> None:
    """Kill at each moment, repeatedly, until a pass was open."""
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
    """Return the runs whose creation was answered."""
    answers = (line.split() for line in moments if line.startswith("api.before_answer"))
    return {run_of(RequestId(answer[2])) for answer in answers if answer[2].endswith(":0:0")}
