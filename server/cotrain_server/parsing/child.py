"""Child process that parses large bodies, controlled through pipes. `child_main.py` is its program.

A parser in C holds the interpreter lock from the first byte to the last: a million numbers block all other threads of a
process for 0.1 s. The memory of the child is freed when it exits. The kernel kills it if one call takes too much memory
or processor time.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from cotrain_server.errors import BodyTooLarge
from cotrain_server.parsing.child_main import TOO_LARGE

log = structlog.get_logger()

Answer = TypeVar("Answer")

#: Processor time of one call in seconds. The slowest body within all other limits takes 5 s of one core.
MAX_CPU_S = 15.0
#: Size of each pipe, where the system allows it. A body fills the default, 64 KB, many times.
PIPE_BYTES = 1024**2
#: Settings of the C library: freed memory stays in the process until it is stopped. To get it back from the kernel for
#: each body takes a third of the processor time.
_KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(256 * 1024**2), "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
}  # fmt: skip
_TOO_LONG = "The request body takes more than {:g} s of processor time to read. Send it in several requests."


class ChildProcess:
    """One child process, started on first use. Only one thread may use it at a time."""

    def __init__(self, max_cpu_s: float = MAX_CPU_S) -> None:
        self._max_cpu_s = max_cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._used_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not running."""
        return None if self._process is None else self._process.pid

    def run(self, work: Callable[..., Answer], *args: Any) -> Answer:
        """Call a module-level function in the child. Return its result or raise its exception. Raises BodyTooLarge:
        more than MAX_BYTES or MAX_CPU_S, or the process crashed. The next call starts another process.
        """
        process = self._process = self._process or _started(self._max_cpu_s)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((work, args), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            has_worked, answer = pickle.load(process.stdout)  # noqa: S301  # of the same program
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as crashed:
            self.stop()
            log.warning("parser_crashed", status=process.returncode)
            is_late = process.returncode == -signal.SIGPROF
            reason = _TOO_LONG.format(self._max_cpu_s) if is_late else TOO_LARGE
            raise BodyTooLarge(reason) from crashed
        finally:
            self._used_at = time.monotonic()
        if not has_worked:
            raise answer
        return answer  # type: ignore[no-any-return]  # as the function gave it

    def kill(self) -> None:
        """Kill the process during a call, which then raises. Any thread may call this."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self, idle_s: float = 0.0) -> None:
        """Kill the process if it was idle for `idle_s`, and free its memory. Idempotent."""
        process = self._process
        if process is not None and time.monotonic() - self._used_at >= idle_s:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # unread input
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def _started(max_cpu_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cotrain_server.parsing.child_main", str(max_cpu_s)]
    # A separate process group: Ctrl-C is for the parent only, and the child exits when its pipe closes. Not a separate
    # session, between which Linux shares the processors equally, whatever their priorities.
    return subprocess.Popen(  # noqa: S603  # ourselves
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_KEEPS_MEMORY, **os.environ},
        process_group=0,
        pipesize=PIPE_BYTES,
    )
