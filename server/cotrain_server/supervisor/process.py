"""Keep one process running until it shall stop."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.refusal import EXIT_CODE, last_reason

TETHER = Path(__file__).with_name("exec_with_parent.py")
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
WINDOW_S = 60.0
#: This many crashes within the window are no accident.
CRASH_LOOP_COUNT = 5
#: A process that crashed again and again is taken for healthy once it has lived this long.
HEALED_AFTER_S = 20.0
LINES = Path(__file__).with_name("json_log.py")
#: What a process wrote last is in its log by then, unless something that it started lives on.
LAST_LINES_S = 5.0


class CannotServe(Exception):
    """A process refused to start, and would again."""


@dataclass(frozen=True)
class Reason:
    """Why a process ended."""

    text: str
    is_final: bool
    """Whether the next start would end likewise."""


@dataclass(frozen=True)
class Program:
    """What to run, and how to end it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    grace_s: float
    """Time between SIGTERM and SIGKILL."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends it when this supervisor is gone."""
    pass_fds: tuple[int, ...] = ()
    good_life_s: float = 20.0
    """A process that ran this long had started well: the next start does not wait."""
    reason_of: Callable[[Sequence[str]], Reason | None] | None = None
    """Read why it ended from the last lines of its log. None: as our own processes say it, with status 2."""


@dataclass(frozen=True)
class RestartHistory:
    """When a process crashed within the last WINDOW_S, and how soon it is started again; in seconds."""

    times: tuple[float, ...] = ()
    well_until: float = -math.inf
    """When it last crashed after a good life."""

    def plus(self, now: float, *, lived_well: bool = False) -> RestartHistory:
        """Add one more crash and drop the old ones."""
        recent = (time for time in self.times if now - time < WINDOW_S)
        return RestartHistory((*recent, now), now if lived_well else self.well_until)

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: 0.1 s, doubled with each crash since a good life, at most 5 s."""
        in_a_row = sum(time >= self.well_until for time in self.times)
        if in_a_row >= CRASH_LOOP_COUNT:
            return LONGEST_DELAY_S
        return min(FIRST_DELAY_S * 2.0 ** (in_a_row - 1), LONGEST_DELAY_S)

    @property
    def is_crash_loop(self) -> bool:
        """Whether an operator should look: it is still started again, but only every 5 s if it lives shortly."""
        return len(self.times) >= CRASH_LOOP_COUNT


@dataclass
class Child:
    """One program, started again whenever it dies."""

    program: Program
    folder: DataFolder
    say: Callable[[str], None]
    report_problem: Callable[[str, str | None], None]
    """Called with the name and what is wrong, or None when it is well again."""
    give_up: Callable[[str], bool] = lambda reason: False
    """Called with why it refused to start, if it did; True ends the keeping."""
    restarts: RestartHistory = field(default_factory=RestartHistory)
    _process: asyncio.subprocess.Process | None = None
    _logged: set[asyncio.Task[int]] = field(default_factory=set)
    """Done when all that a start of it printed is in its log."""
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        """Run the program until `stop`."""
        try:
            await self._keep()
        finally:
            await self._all_logged()

    async def _keep(self) -> None:
        name = self.program.name
        while not self._stopping.is_set():
            started_at = time.monotonic()
            ended, reason = await self._run_once()
            if self._stopping.is_set() or (
                reason and reason.is_final and self.give_up(reason.text)
            ):
                return
            now = time.monotonic()
            lived_well = now - started_at >= self.program.good_life_s
            self.restarts = self.restarts.plus(now, lived_well=lived_well)
            again = f"starting it again in {self.restarts.delay_s:g} s"
            why = f": {reason.text}" if reason else ""
            self.say(f"{name} {ended}; {again}; see {self.folder.log_of(name)}{why}")
            if self.restarts.is_crash_loop:
                times = f"{len(self.restarts.times)} times in the last minute"
                self.report_problem(name, f"{ended}, {times}{why or '; its log says why.'}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self.restarts.delay_s)

    async def stop(self) -> None:
        """End the program: SIGTERM, and SIGKILL to it and all it started once its grace is over."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.program.grace_s)
        except TimeoutError:
            self.say(f"{self.program.name} did not end in {self.program.grace_s:g} s; killing it")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the program and all it started at once: what it had accepted is replayed later."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> tuple[str, Reason | None]:
        """Run the program until it ends; say how it did, and why, where it says that."""
        try:
            self._process = await self._start()
        except OSError as error:  # no memory, no process left, no disk for its log
            return f"could not be started ({error.strerror})", None
        if self._stopping.is_set():  # while it was being started
            self.kill()
        self.say(f"{self.program.name} started (pid {self._process.pid})")
        status = await self._outlived(self._process)
        return _ended(status), await self._reason(status)

    async def _start(self) -> asyncio.subprocess.Process:
        program = self.program
        lines_end, written_end = os.pipe()
        try:
            lines = await self._start_lines(lines_end)
            self._logged = {task for task in self._logged if not task.done()}
            self._logged.add(asyncio.create_task(lines.wait()))
            return await _exec(
                [str(TETHER), str(os.getpid()), str(int(program.death_signal)), *program.command],
                stdin=asyncio.subprocess.DEVNULL,
                output=written_end,
                env=program.environment,
                pass_fds=program.pass_fds,
            )
        finally:
            os.close(lines_end)
            os.close(written_end)

    async def _start_lines(self, lines_end: int) -> asyncio.subprocess.Process:
        """Start what writes the program's log: it ends when the last that holds the pipe does."""
        log = self.folder.open_log(self.program.name)
        try:
            return await _exec([str(LINES), self.program.name], stdin=lines_end, output=log, env={})
        finally:
            os.close(log)

    async def _reason(self, status: int) -> Reason | None:
        reason_of = self.program.reason_of or (_own_reason if status == EXIT_CODE else None)
        if status <= 0 or reason_of is None:
            return None
        await self._all_logged()
        return reason_of(self.folder.log_end(self.program.name))

    async def _all_logged(self) -> None:
        if self._logged:
            await asyncio.wait(self._logged, timeout=LAST_LINES_S)

    async def _outlived(self, process: asyncio.subprocess.Process) -> int:
        if not self.restarts.is_crash_loop:
            return await process.wait()
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), HEALED_AFTER_S)
        self.report_problem(self.program.name, None)
        self.restarts = RestartHistory()
        return await process.wait()


async def _exec(
    arguments: Sequence[str],
    *,
    stdin: int,
    output: int,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start one of our small scripts, which need no packages (-S), whatever this environment says (-I).

    In a session of its own: Ctrl-C is for the supervisor, which ends its children in order.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        *arguments,
        env=env,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def _own_reason(lines: Sequence[str]) -> Reason | None:
    text = last_reason(lines)
    return None if text is None else Reason(text, is_final=True)


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
