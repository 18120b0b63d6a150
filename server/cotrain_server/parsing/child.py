"""The process that parses what is large: `python -m cotrain_server.parsing.child`, driven through its pipes.

A parser in C holds the interpreter's lock from its first byte to its last: a million numbers stop every
other thread of a process for a tenth of a second. What it takes of memory ends with it. The kernel ends it
where one call takes too much of either memory or processor time.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import structlog

import cotrain_server.blas_threads  # noqa: F401  # its import sets them, before that of numpy
from cotrain_server.errors import BodyTooLarge

log = structlog.get_logger()

Answer = TypeVar("Answer")

#: Address space, some of it for libraries. The largest JSON that is let in takes 0.6 GB.
MAX_BYTES = 2 * 1024**3
#: Processor time of one call. The slowest body within all other limits takes 5 s of one core.
MAX_CPU_S = 15.0
_TOO_LARGE = "The request body takes too much memory to read. Send it in several requests."
_TOO_LONG = "The request body takes more than {:g} s of processor time to read. Send it in several requests."


class ChildProcess:
    """One process, started on first use. For one thread at a time."""

    def __init__(self, max_cpu_s: float = MAX_CPU_S) -> None:
        self._max_cpu_s = max_cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._used_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none."""
        return None if self._process is None else self._process.pid

    def run(self, work: Callable[..., Answer], *args: Any) -> Answer:
        """Call a function of a module there, and give what it gives or raise what it raises.

        Raises:
            BodyTooLarge: more than MAX_BYTES or MAX_CPU_S, or the process crashed. The next call has another
                process.
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
            reason = _TOO_LONG.format(self._max_cpu_s) if is_late else _TOO_LARGE
            raise BodyTooLarge(reason) from crashed
        finally:
            self._used_at = time.monotonic()
        if not has_worked:
            raise answer
        return answer  # type: ignore[no-any-return]  # as the function gave it

    def kill(self) -> None:
        """End the process in the middle of a call, which raises. Any thread may do so."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self, idle_s: float = 0.0) -> None:
        """End the process where it was idle for so long, and take its memory back. Twice is harmless."""
        process = self._process
        if process is not None and time.monotonic() - self._used_at >= idle_s:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # what it did not read
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def _started(max_cpu_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cotrain_server.parsing.child", str(max_cpu_s)]
    # In a session of its own: Ctrl-C is for its parent, and it ends when that closes the pipe.
    return subprocess.Popen(  # noqa: S603  # ourselves
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def main() -> None:
    """Answer calls until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    max_cpu_s = float(sys.argv[1])
    os.nice(5)  # others of this host are waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what anything prints is no answer
    while True:
        try:
            work, args = pickle.load(calls)  # noqa: S301  # of the same program
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF ends this process
        try:
            answer = True, work(*args)
        except MemoryError:
            answer = False, BodyTooLarge(_TOO_LARGE)
        except Exception as error:  # noqa: BLE001  # its caller is in the other process
            answer = False, error
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
        del work, args, answer


if __name__ == "__main__":
    main()
