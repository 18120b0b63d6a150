"""Restarts of a child process, with real processes and real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cotrain_server.supervisor import process as children
from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.process import EXEC_WITH_PARENT, ManagedProcess, Program, Reason, RestartHistory
from tests.support.waiting import until

SLEEPER = Program("sleeper", ["sleep", "60"], {"PATH": os.environ["PATH"]}, grace_s=5)
STUBBORN = replace(SLEEPER, command=["sh", "-c", "trap '' TERM; echo up; sleep 60"], grace_s=0.1)
BROKEN = replace(SLEEPER, name="broken", command=["sh", "-c", "exit 7"])


class Watched:
    """Managed process with its printed lines and its reported problems."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.problems: list[str | None] = []
        self.child = ManagedProcess(
            program, DataFolder(folder), self.lines.put_nowait, lambda _, t: self.problems.append(t)
        )
        self.kept = asyncio.create_task(self.child.run_until_stopped())

    async def pid(self) -> int:
        """Wait for the next start. Return its process id."""
        while True:
            line = await self.lines.get()
            if "started" in line:
                return int(line.rpartition(" ")[2].rstrip(")"))

    async def stop(self) -> None:
        await self.child.stop()
        await self.kept


async def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    first = await watched.pid()
    os.kill(first, signal.SIGKILL)
    crashed = await watched.lines.get()
    log = tmp_path / "logs" / "sleeper.log"
    assert crashed == f"sleeper was killed by SIGKILL; starting it again in 0.1 s; see {log}"
    assert await watched.pid() != first
    await watched.stop()


async def test_a_stopped_process_is_not_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    pid = await watched.pid()
    await watched.stop()
    assert watched.lines.empty()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_stopped_during_its_start_does_not_stay(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    await asyncio.sleep(0)  # enough for the start to begin, not enough for it to finish
    await watched.child.stop()
    await asyncio.wait_for(watched.kept, 120)


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    watched = Watched(tmp_path, replace(STUBBORN, pass_fds=(write_end,)))
    await watched.pid()
    os.close(write_end)
    log = tmp_path / "logs" / "sleeper.log"
    await until(log.read_text)  # the trap is set before this is written
    await watched.stop()
    assert await watched.lines.get() == "sleeper did not end in 0.1 s; killing it"
    assert os.read(read_end, 1) == b""  # its last holder has exited
    os.close(read_end)


async def test_a_crash_loop_is_reported_and_restarts_continue(tmp_path: Path) -> None:
    watched = Watched(tmp_path, BROKEN)
    watched.child.restarts = RestartHistory((time.monotonic(),) * 4)
    await watched.pid()
    assert "starting it again in 5 s" in await watched.lines.get()
    assert watched.problems == ["exited with status 7, 5 times in the last minute; its log says why."]
    await watched.stop()


async def test_a_process_killed_after_a_long_run_is_restarted_at_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, replace(SLEEPER, good_run_s=0.0))
    watched.child.restarts = RestartHistory((time.monotonic(),) * 9)
    for _ in range(2):
        os.kill(await watched.pid(), signal.SIGKILL)
        assert "starting it again in 0.1 s" in await watched.lines.get()
    assert "10 times in the last minute" in str(watched.problems[0])
    await watched.stop()


async def test_the_reason_that_a_program_logs_for_its_end_is_reported(tmp_path: Path) -> None:
    def reason_of(lines: Sequence[str]) -> Reason:
        return Reason(json.loads(lines[-1])["event"], is_final=False)

    saying = replace(SLEEPER, command=["sh", "-c", "echo no room; exit 1"], reason_of=reason_of)
    watched = Watched(tmp_path, saying)
    watched.child.give_up = pytest.fail
    await watched.pid()
    assert (await watched.lines.get()).endswith("sleeper.log: no room")
    await watched.stop()


REFUSING = replace(SLEEPER, command=["sh", "-c", """echo '{"ts": "", "reason": "No such model."}' >&2; exit 2"""])


async def test_a_refusal_to_start_is_reported_and_ends_the_restarts(tmp_path: Path) -> None:
    watched, refusals = Watched(tmp_path, REFUSING), list[str]()

    def end(reason: str) -> bool:
        refusals.append(reason)
        return True

    watched.child.give_up = end
    await asyncio.wait_for(watched.kept, 120)
    assert refusals == ["No such model."]
    assert watched.lines.qsize() == 1  # started once


async def test_a_refusal_of_a_program_that_ran_before_is_retried(tmp_path: Path) -> None:
    watched = Watched(tmp_path, REFUSING)
    watched.child.restarts = RestartHistory((time.monotonic(),) * 4)
    await watched.pid()
    assert "starting it again in 5 s" in await watched.lines.get()
    assert watched.problems == ["exited with status 2, 5 times in the last minute: No such model."]
    await watched.stop()


async def test_a_problem_is_cleared_once_the_process_runs_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "HEALED_AFTER_S", 0.01)
    watched = Watched(tmp_path, SLEEPER)
    watched.child.restarts = RestartHistory((time.monotonic(),) * 5)
    await watched.pid()
    await until(lambda: watched.problems)
    assert watched.problems == [None]
    await watched.stop()


def test_a_tethered_process_ends_with_its_supervisor() -> None:
    # The supervisor starts a tethered sleeper, prints its process id, and waits to be killed.
    supervise = (
        "import os, subprocess, sys, time\n"
        f"tether = [sys.executable, '-I', '-S', {str(EXEC_WITH_PARENT)!r}, str(os.getpid()), '9']\n"
        "print(subprocess.Popen([*tether, 'sh', '-c', 'echo up; exec sleep 60']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", supervise], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout
        printed = {supervisor.stdout.readline().strip() for _ in range(2)}
        assert "up" in printed
        supervisor.kill()
        # The pipe ends when its last holder exits. A sleeper that stayed would hold it.
        assert supervisor.stdout.read() == ""


def test_a_tether_to_an_ended_supervisor_starts_nothing() -> None:
    command = [sys.executable, "-I", "-S", str(EXEC_WITH_PARENT), "1", "9", "echo", "started"]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def crashed_at(times: list[float]) -> RestartHistory:
    history = RestartHistory()
    for crash in times:
        history = history.with_crash(crash)
    return history


def test_the_first_crash_is_followed_by_a_restart_after_100_ms() -> None:
    assert crashed_at([100.0]).delay_s == 0.1


def test_each_further_crash_doubles_the_delay() -> None:
    assert [crashed_at([0.0] * n).delay_s for n in range(1, 5)] == [0.1, 0.2, 0.4, 0.8]


def test_five_crashes_in_a_minute_are_a_crash_loop() -> None:
    history = crashed_at([0.0, 10.0, 20.0, 30.0, 59.0])
    assert history.is_crash_loop
    assert history.delay_s == 5.0


def test_a_long_run_resets_the_restart_delay() -> None:
    history = crashed_at([0.0, 1.0, 2.0, 3.0, 4.0]).with_crash(9.0, ran_well=True)
    assert history.is_crash_loop
    assert history.delay_s == 0.1
    assert history.with_crash(10.0).delay_s == 0.2


def test_old_crashes_do_not_count() -> None:
    history = crashed_at([0.0, 1.0, 2.0, 3.0, 100.0])
    assert not history.is_crash_loop
    assert history.delay_s == 0.1
