"""A supervised process, restarted until it is stopped."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.messages.fleet import WorkerExit
from cotrain_store.process_start import EXIT_CODE, last_reason

EXEC_WITH_PARENT = Path(__file__).with_name("exec_with_parent.py")
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
WINDOW_S = 60.0
#: Number of crashes within the window that counts as a crash loop.
CRASH_LOOP_COUNT = 5
#: A process in a crash loop counts as healthy after running this long, in seconds.
HEALED_AFTER_S = 20.0
JSON_LOG = Path(__file__).with_name("json_log.py")
#: Time for the last output to reach the log, in seconds. A child that keeps the pipe open can exceed it.
LAST_LINES_S = 5.0


class CannotServe(Exception):
    """A process refused to start, and would again."""


@dataclass(frozen=True)
class Reason:
    """Reason for the exit of a process."""

    text: str
    is_final: bool  # True if the next start would fail in the same way


@dataclass(frozen=True)
class Program:
    """A command to run, with its environment and shutdown."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    grace_s: float  # time between SIGTERM and SIGKILL, in seconds
    death_signal: signal.Signals = signal.SIGKILL
    """Signal from the kernel to the process when the supervisor exits."""
    pass_fds: tuple[int, ...] = ()
    good_run_s: float = 20.0
    """A process that ran at least this long started well, so its next start is not delayed."""
    worker: tuple[str, str] | None = None  # Base model and id of a worker; None for other programs
    reason_of: Callable[[Sequence[str]], Reason | None] | None = None
    """Finds the reason of an exit in the last lines of the log. None: the format of our own processes, for status 2."""


@dataclass(frozen=True)
class RestartHistory:
    """Crash times within the last WINDOW_S, and the delay of the next start, in seconds."""

    times: tuple[float, ...] = ()
    ran_well_at: float = -math.inf  # time of the last crash after a good run

    def with_crash(self, now: float, *, ran_well: bool = False) -> RestartHistory:
        """Return the history with another crash and without old ones."""
        recent = (time for time in self.times if now - time < WINDOW_S)
        return RestartHistory((*recent, now), now if ran_well else self.ran_well_at)

    @property
    def delay_s(self) -> float:
        """Delay before the next start: 0.1 s, doubled with each crash since a good run, at most 5 s."""
        in_a_row = sum(time >= self.ran_well_at for time in self.times)
        if in_a_row >= CRASH_LOOP_COUNT:
            return LONGEST_DELAY_S
        return min(FIRST_DELAY_S * 2.0 ** (in_a_row - 1), LONGEST_DELAY_S)

    @property
    def is_crash_loop(self) -> bool:
        """True if an operator should investigate. The process is still restarted, but only every 5
        s if it crashes early.
        """
        return len(self.times) >= CRASH_LOOP_COUNT


@dataclass
class ManagedProcess:
    """A program that is restarted after each exit."""

    program: Program
    folder: DataFolder
    say: Callable[[str], None]
    report_problem: Callable[[str, str | None], None]
    """Called with the name and the problem, or None after recovery."""
    give_up: Callable[[str], bool] = lambda reason: False
    """Called with the reason of a refused start. True ends the restarts."""
    record_exit: Callable[[WorkerExit], Awaitable[None]] | None = None
    """Called after each exit of a worker that was not requested."""
    restarts: RestartHistory = field(default_factory=RestartHistory)
    _exits: int = 0
    _down_since: float = 0.0
    _process: asyncio.subprocess.Process | None = None
    _log_writers: set[asyncio.Task[int]] = field(default_factory=set)
    """Tasks that end when all output of a start is in its log."""
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run_until_stopped(self) -> None:
        """Run the program until `stop`."""
        try:
            await self._restart_until_stopped()
        finally:
            await self._all_logged()

    async def _restart_until_stopped(self) -> None:
        name = self.program.name
        while not self._stopping.is_set():
            started_at = time.monotonic()
            ended, reason = await self._run_once()
            if self._stopping.is_set() or (reason and reason.is_final and self.give_up(reason.text)):
                return
            now = time.monotonic()
            ran_well = now - started_at >= self.program.good_run_s
            self.restarts = self.restarts.with_crash(now, ran_well=ran_well)
            again = f"starting it again in {self.restarts.delay_s:g} s"
            why = f": {reason.text}" if reason else ""
            self.say(f"{name} {ended}; {again}; see {self.folder.log_of(name)}{why}")
            self._exits += 1
            if ran_well or self._exits == 1:
                self._down_since = time.time()
            if self.record_exit:
                text = reason.text if reason else f"It {ended}."
                await self.record_exit(WorkerExit(time.time(), self._exits, text, self._down_since))
            if self.restarts.is_crash_loop:
                times = f"{len(self.restarts.times)} times in the last minute"
                self.report_problem(name, f"{ended}, {times}{why or '; its log says why.'}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self.restarts.delay_s)

    async def stop(self) -> None:
        """Stop the program: SIGTERM, and after the grace period SIGKILL to its process group."""
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
        """Kill the program's process group at once. Accepted work is replayed later."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> tuple[str, Reason | None]:
        """Run the program until it exits. Return a description of the exit, and its reason if known."""
        try:
            self._process = await self._start()
        except OSError as error:  # no memory, too many processes, or no disk space for the log
            return f"could not be started ({error.strerror})", None
        if self._stopping.is_set():  # while it was being started
            self.kill()
        self.say(f"{self.program.name} started (pid {self._process.pid})")
        status = await self._wait_for_exit(self._process)
        return _ended(status), await self._reason(status)

    async def _start(self) -> asyncio.subprocess.Process:
        program = self.program
        read_end, write_end = os.pipe()
        try:
            log_writer = await self._start_log_writer(read_end)
            self._log_writers = {task for task in self._log_writers if not task.done()}
            self._log_writers.add(asyncio.create_task(log_writer.wait()))
            return await _exec(
                [str(EXEC_WITH_PARENT), str(os.getpid()), str(int(program.death_signal)), *program.command],
                stdin=asyncio.subprocess.DEVNULL,
                output=write_end,
                env=program.environment,
                pass_fds=program.pass_fds,
            )
        finally:
            os.close(read_end)
            os.close(write_end)

    async def _start_log_writer(self, read_end: int) -> asyncio.subprocess.Process:
        """Start the process that writes the program's log. It exits when the last writer closes the pipe."""
        log = self.folder.open_log(self.program.name)
        try:
            return await _exec([str(JSON_LOG), self.program.name], stdin=read_end, output=log, env={})
        finally:
            os.close(log)

    async def _reason(self, status: int) -> Reason | None:
        reason_of = self.program.reason_of or (_own_reason if status == EXIT_CODE else None)
        if status <= 0 or reason_of is None:
            return None
        await self._all_logged()
        return reason_of(self.folder.log_end(self.program.name))

    async def _all_logged(self) -> None:
        if self._log_writers:
            await asyncio.wait(self._log_writers, timeout=LAST_LINES_S)

    async def _wait_for_exit(self, process: asyncio.subprocess.Process) -> int:
        if not self.restarts.is_crash_loop:
            return await process.wait()
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), HEALED_AFTER_S)
        self.report_problem(self.program.name, None)
        self.restarts = RestartHistory()
        return await process.wait()


async def _exec(
    arguments: Sequence[str], *, stdin: int, output: int, env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start one of our small scripts, without packages (-S) and independent of the environment (-I).

    It runs in its own session: Ctrl-C reaches only the supervisor, which stops its children in order.
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
