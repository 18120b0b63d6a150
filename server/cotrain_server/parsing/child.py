"""The process that parses large JSON: `python -m cotrain_server.parsing.child`, driven through its pipes.

A parser in C holds the interpreter's lock from its first byte to its last: a million numbers stop every
other thread of a process for a tenth of a second. What it takes of memory ends with it.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any, TypeVar

import structlog

import cotrain_server.blas_threads  # noqa: F401  # its import sets them, before that of numpy
from cotrain_server.errors import BodyTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

Answer = TypeVar("Answer")

#: Address space, most of it for libraries. The largest JSON that is let in takes 0.6 GB.
MAX_BYTES = 4 * 1024**3
_TOO_LARGE = "The request body takes too much memory to read."
_SIZE = struct.Struct("<Q")


class ChildProcess:
    """One process, started on first use. For one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none."""
        return None if self._process is None else self._process.pid

    def run(self, work: Callable[..., Answer], *args: Any) -> Answer:
        """Call a function of a module there, and give what it gives or raise what it raises.

        Raises:
            BodyTooLarge: also where the process crashed; the next call has another one.
        """
        process = self._process = self._process or _started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, (work, args))
            has_worked, answer = _read(process.stdout)
        except (EOFError, BrokenPipeError) as crashed:
            self.stop()
            log.warning("parser_crashed", status=process.returncode)
            raise BodyTooLarge(_TOO_LARGE) from crashed
        if not has_worked:
            raise answer
        return answer  # type: ignore[no-any-return]  # as the function gave it

    def stop(self) -> None:
        """End the process, and take its memory back. Twice is harmless."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cotrain_server.parsing.child"]
    # In a session of its own: Ctrl-C is for its parent, and it ends when that closes the pipe.
    return subprocess.Popen(  # noqa: S603  # ourselves
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def _write(pipe: IO[bytes], message: object) -> None:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(_SIZE.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        raise EOFError
    (size,) = _SIZE.unpack(head)
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return pickle.loads(content)  # noqa: S301  # of the same program, through a pipe


def main() -> None:
    """Answer calls until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    os.nice(5)  # others of this host are waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            work, args = _read(calls)
        except EOFError:
            return
        try:
            answer = True, work(*args)
        except MemoryError:
            answer = False, BodyTooLarge(_TOO_LARGE)
        except Exception as error:  # noqa: BLE001  # its caller is in the other process
            answer = False, error
        _write(answers, answer)
        del work, args, answer


if __name__ == "__main__":
    main()
