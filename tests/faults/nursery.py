"""Parent process that starts real processes in milliseconds: it forks them with everything imported
and loaded.

`python -m tests.faults.nursery MODEL TOKENS` (tokens of a micro-batch) reads orders, one JSON
object per line, and writes their results. A child behaves like `python -m <module>` from its `main`
on: it has its own environment, log and exit status. Only its imports and the base model's weights
come from the parent. When the nursery ends, so do its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1
PROBE_TOKENS = 256
MODULES = ("cotrain_server", "cotrain_scheduler", "cotrain_workers")


class Nursery:
    """Parent of all processes of one test session. It is single-threaded, because it forks."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self._listeners: list[socket.socket] = []

    def serve(self) -> None:
        """Execute orders until the input ends."""
        reader, _ = wake_on_child()
        rest = b""
        while True:
            ready, _, _ = select.select([0, reader], [], [])
            if reader in ready:
                os.read(reader, 4096)
                self._reap()
            if 0 in ready:
                read = os.read(0, 1 << 16)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        match order.pop("do"):
            case "start":
                tell(answer=self._start(**order))
            case "signal":
                if order["pid"] in self._alive:
                    os.kill(order["pid"], order["signal"])
            case "listen":
                self._listeners.append(socket.create_server(("127.0.0.1", 0), backlog=1024))
                self._listeners[-1].set_inheritable(True)
                port = self._listeners[-1].getsockname()[1]
                tell(answer=[port, self._listeners[-1].fileno()])

    def _start(self, run: str | list[str], environment: dict[str, str], log: str) -> int:
        child = os.fork()
        if child == 0:
            become(run, environment, log)
        self._alive.add(child)
        return child

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._alive.discard(pid)
                tell(ended=pid, status=os.waitstatus_to_exitcode(status))


def become(run: str | list[str], environment: dict[str, str], log: str) -> None:
    """Run a module or another program in the forked child. Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for name in [name for name in os.environ if name.startswith("COTRAIN_")]:
        del os.environ[name]
    os.environ.update(environment)
    if not isinstance(run, str):
        os.execvp(run[0], run)
    faulthandler.register(signal.SIGUSR1)  # for `host.SHOW_STACKS`, when a process is stuck
    status: object = 1
    try:
        arm()
        module, *arguments = run.split()
        sys.argv = [module, *arguments]
        importlib.import_module(f"{module}.__main__").main()
        status = 0
    except SystemExit as left:
        status = left.code
    except BaseException:  # noqa: BLE001  # as in the interpreter
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def arm() -> None:
    """Read the failpoints, as a process does on import."""
    from cotrain_store import failpoints

    failpoints._FAULTS = failpoints.Faults.configured(os.environ)


def preload(model: str, micro_batch_tokens: str) -> None:
    """Import the modules of the children, load the base model for their engines, and train with it,
    because the first pass is the slowest."""
    gc.disable()  # as `tests.warm.parent` does
    import torch
    from fastapi.openapi.utils import get_openapi
    from tqdm import tqdm

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"{module}.__main__")
    from cotrain_server.app import ROUTES
    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.worker import bootstrap

    tqdm.monitor_interval = 0  # no thread for progress bars
    # builds the routes for all API processes
    get_openapi(title="", version="", routes=ROUTES.routes)
    loaded = Engine.load(model, micro_batch_tokens="auto" if micro_batch_tokens == "auto" else int(micro_batch_tokens))
    Engine.load = lambda *_, **__: loaded  # type: ignore[method-assign]  # loaded once
    tokens_per_s = bootstrap.measure_throughput(loaded, PROBE_TOKENS)
    bootstrap.measure_throughput = lambda *_: tokens_per_s
    assert threading.active_count() == 1, threading.enumerate()
    gc.enable()
    gc.collect()
    gc.freeze()  # pages that no child's collector touches stay shared


def wake_on_child() -> tuple[int, int]:
    """Make a pipe that becomes readable when a child has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer)
    return reader, writer


def tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    preload(*sys.argv[1:])
    tell(answer="ready")
    Nursery().serve()
