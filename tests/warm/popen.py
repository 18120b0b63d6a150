"""`subprocess.Popen` for Python programs: a real process, forked from a warm parent where that is the same.

It is the same for `python -m MODULE` and for scripts, unless the environment has another value than this
test run's for a variable that something reads when it is imported. Programs of an SDK that is not the
installed one are forked from a parent that has imported that one.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.warm.sources import COMMAND, ROOT, SDKS, SOURCES

_PYTHONPATH = os.pathsep.join(SOURCES)
AT_START = dict(os.environ)
#: Read when they are needed, or by nothing that is forked: a child may have another value than its parent.
READ_LATER = {
    "PATH", "PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM",
    "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "GOMP_SPINCOUNT",
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
    "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HTTPS_PROXY", "FOLDER", "CHECKPOINT", "FASTAPI_OTEL_AUTO_CONFIGURE",
    "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR",
    *(f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")),
}  # fmt: skip
READ_LATER_PREFIXES = ("COTRAIN_", "JPY_", "OTEL_", "PYTEST_", "TINKER_", "MINT_")
READ_LATER_SUFFIX = "_API_KEY"
#: The process of the test run, in the environment of those that pytest-xdist has in it.
RUN = "PYTEST_RUN"
RETRY_S = 0.01
_parents: list[subprocess.Popen[bytes]] = []
"""References until the end of this process. The parent outlives it and is not waited for."""


class Order(NamedTuple):
    """A forkable program, as a command line describes it."""

    program: tuple[str, str]
    """`module`, `script` or `code`, and its name, or the code itself."""
    arguments: Sequence[str]
    sees_folder: bool
    """Its first place to look for modules is the folder it is started in, or that of the script."""
    ignores_warnings: bool


def read_command(command: Sequence[str]) -> Order | None:
    """Read a command line; None for one that is no plain start of a Python program. Pure."""
    first, *rest = map(str, command)
    if first == str(COMMAND):
        return Order(("script", first), rest, sees_folder=False, ignores_warnings=False)
    if first != sys.executable:
        return None
    sees_folder, ignores_warnings = True, False
    while rest:
        match rest:
            case ["-P", *rest]:
                sees_folder = False
            case ["-W", "ignore", *rest]:
                ignores_warnings = True
            case ["-u", *rest]:
                pass  # forked processes write every line at once
            case ["-m", module, *arguments]:
                return Order(("module", module), arguments, sees_folder, ignores_warnings)
            case ["-c", code, *arguments]:
                return Order(("code", code), arguments, sees_folder, ignores_warnings)
            case [option, *_] if option.startswith("-"):
                return None
            case [script, *arguments]:
                return Order(("script", script), arguments, sees_folder, ignores_warnings)
    return None


def is_same(environment: Mapping[str, str]) -> bool:
    """Return True if imports have the same result as in the parent."""
    names = {
        name
        for name in AT_START.keys() | environment.keys()
        if AT_START.get(name) != environment.get(name)
        and name not in READ_LATER
        and not name.startswith(READ_LATER_PREFIXES)
        and not name.endswith(READ_LATER_SUFFIX)
    }
    known = {*SOURCES, str(ROOT), *folders_of(AT_START)}
    return names <= {"PYTHONPATH"} and all(
        folder in known or Path(folder).is_relative_to(SDKS) for folder in folders_of(environment)
    )


def folders_of(environment: Mapping[str, str]) -> list[str]:
    """List the folders of `PYTHONPATH`."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def path_of_parent(environment: Mapping[str, str]) -> str:
    """Return the `PYTHONPATH` that identifies a parent: our sources, or another SDK."""
    sdks = [folder for folder in folders_of(environment) if Path(folder, "tinker").is_dir()]
    return sdks[0] if sdks else _PYTHONPATH


def order(
    orderer: socket.socket,
    what: Order,
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    folder: str | None = None,
    new_session: bool = False,
    death_signal: int = signal.SIGKILL,
) -> int:
    """Start a process and return its id. `descriptors` are ours by their number in it."""
    text = json.dumps({
        **what._asdict(),
        "descriptors": list(descriptors),
        "environment": dict(environment),
        "folder": str(Path(folder or ".").resolve()),
        "new_session": new_session,
        "death_signal": int(death_signal),
    })  # fmt: skip
    socket.send_fds(orderer, [text.encode()], list(descriptors.values()))
    return heard(orderer)


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose forked processes get SIGKILL when this process ends."""

    _orderer: socket.socket | None = None

    def _execute_child(self, *arguments: Any) -> None:  # in the order of Python 3.11 to 3.13
        args, _, _, _, pass_fds, cwd, env, _, _, shell, *pipes = arguments[:16]
        environment = {**(os.environ if env is None else env)}
        what = None if shell or isinstance(args, str) else read_command(args)
        if what is None or not is_same(environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        theirs = enumerate((pipes[0], pipes[3], pipes[5]))
        descriptors = {number: number if pipe == -1 else pipe for number, pipe in theirs}
        descriptors |= {descriptor: descriptor for descriptor in pass_fds}
        self._orderer = self._connected(environment)
        self.pid = order(
            self._orderer, what, descriptors, environment,
            folder=cwd, new_session=arguments[21],
        )  # fmt: skip
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _connected(self, environment: Mapping[str, str]) -> socket.socket:
        """Return a connection to the parent of such a process."""
        return connected(path_of_parent(environment))

    def _internal_poll(self, *arguments: Any, **keywords: Any) -> int | None:
        if self._orderer is None:
            return super()._internal_poll(*arguments, **keywords)  # type: ignore[misc,no-any-return]
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return process id and status at its end; (0, 0) if it still runs and the call must not wait."""
        if self._orderer is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._orderer], [], [], 0)[0]:
            return 0, 0
        status = heard(self._orderer)
        self._orderer.close()
        return self.pid, status


def run(
    command: Sequence[str | Path], *, input: str | None = None, timeout: float = 600, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` does, with its output as text and without a check of its status."""
    pipe = subprocess.PIPE
    streams = {"stdin": None if input is None else pipe, "stdout": pipe, "stderr": pipe}
    with Popen(command, **{"text": True, **streams, **how}) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def connected(path: str = _PYTHONPATH) -> socket.socket:
    """Return a connection to the parent with this `PYTHONPATH`. Start it if it is missing."""
    environment = {
        **{name: value for name, value in AT_START.items() if not name.startswith(READ_LATER_PREFIXES)},
        **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "RAYON")},
        "PYTHONPATH": path,
    }  # fmt: skip
    return reached(path, ["tests.warm.parent"], environment)


def reached(
    name: str, program: Sequence[str], environment: Mapping[str, str], *, new_session: bool = True
) -> socket.socket:
    """Return a connection to the parent of this name. Start it, a module and its arguments, if it is missing."""
    run = int(os.environ.get(RUN, os.getpid()))
    address = f"\0cotrain-warm-{run}-{zlib.crc32(name.encode())}"
    while True:
        orderer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            orderer.connect(address)
        except ConnectionRefusedError:
            orderer.close()
            start_parent(address, run, program, environment, new_session=new_session)
        else:
            return orderer


def start_parent(
    address: str, run: int, program: Sequence[str], environment: Mapping[str, str], *, new_session: bool
) -> None:
    """Start the parent, unless another process is starting it. Messages sent meanwhile are queued."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(RETRY_S)
            return
        listener.listen(1024)
        module, *arguments = program
        command = [sys.executable, "-m", module, str(listener.fileno()), str(run), *arguments]
        _parents.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=new_session,
            )
        )  # fmt: skip


def heard(orderer: socket.socket) -> int:
    """Wait for a number from the parent."""
    told = orderer.recv(64)
    if not told:
        raise RuntimeError("The process that ours are forked from is gone.")
    return int(told)
