"""Keep one process running until told to stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain_server.restarts import Deaths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cotrain_server.folder import DataFolder

TETHER = Path(__file__).with_name("tether.py")
#: A process that crashed again and again is taken for healthy once it has lived this long.
HEALED_AFTER_S = 20.0


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


@dataclass
class Child:
    """One program, started again whenever it dies."""

    program: Program
    folder: DataFolder
    say: Callable[[str], None]
    report_trouble: Callable[[str, str | None], None]
    """Called with the name and what is wrong, or None when it is well again."""
    deaths: Deaths = field(default_factory=Deaths)
    _process: asyncio.subprocess.Process | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        """Run the program until `stop`."""
        name = self.program.name
        while not self._stopping.is_set():
            ended = await self._run_once()
            if self._stopping.is_set():
                return
            self.deaths = self.deaths.plus(time.monotonic())
            again = f"starting it again in {self.deaths.delay_s:g} s"
            self.say(f"{name} {ended}; {again}; see {self.folder.log_of(name)}")
            if self.deaths.is_crash_loop:
                times = f"{len(self.deaths.times)} times in the last minute"
                self.report_trouble(name, f"{ended}, {times}; its log says why.")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self.deaths.delay_s)

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

    async def _run_once(self) -> str:
        """Run the program until it ends, and say how it did."""
        try:
            self._process = await self._start()
        except OSError as error:  # no memory, no process left, no disk for its log
            return f"could not be started ({error.strerror})"
        if self._stopping.is_set():  # told to while it was being started
            self.kill()
        self.say(f"{self.program.name} started (pid {self._process.pid})")
        return _ended(await self._outlived(self._process))

    async def _start(self) -> asyncio.subprocess.Process:
        program = self.program
        log = self.folder.open_log(program.name)
        # -I -S: the tether needs no packages, and nothing of this environment should change it.
        tether = [sys.executable, "-I", "-S", str(TETHER), str(os.getpid())]
        try:
            return await asyncio.create_subprocess_exec(
                *tether,
                str(int(program.death_signal)),
                *program.command,
                env=program.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for the supervisor, which ends its children in order.
                start_new_session=True,
                pass_fds=program.pass_fds,
            )
        finally:
            os.close(log)

    async def _outlived(self, process: asyncio.subprocess.Process) -> int:
        if not self.deaths.is_crash_loop:
            return await process.wait()
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), HEALED_AFTER_S)
        self.report_trouble(self.program.name, None)
        self.deaths = Deaths()
        return await process.wait()


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
