"""Process from which others are forked: `python -m tests.warm.parent LISTENER RUN`.

It imports once per test run the modules of our programs and of the SDK that it finds. Then it
serves every process that connects to LISTENER, a socket that it inherits. A connection orders one
process and receives its pid, and later its exit status. If the connection is closed before the
process ends, the process gets the signal that the order names. All end with RUN, the process of the
test run, or with this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.warm.child import become
from tests.warm.sources import SOURCES

#: Modules that our programs import, at the start or later.
PROGRAMS = ("cotrain_server", "cotrain_scheduler", "cotrain_workers")
MODULES = (
    *(f"{program}.__main__" for program in PROGRAMS),
    "cotrain.cli",
    "cotrain_server.commands.keys",
    "cotrain_server.commands.serve",
    "cotrain_workers.fetch",
    "fastapi.telemetry._runtime",
    "numpy.ctypeslib",
    "transformers.models.qwen3.modeling_qwen3",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "tests.warm.supervision",
)
#: Modules that programs of the official SDK import.
SDK_MODULES = ("tinker", "tinker.types", "transformers")
LARGEST_ORDER = 1 << 20
MAX_DESCRIPTORS = 32


@dataclass
class Started:
    """A running process, and the connection that ordered it."""

    orderer: socket.socket
    death_signal: int


class Parent:
    """Forks processes. It is single-threaded, because it forks."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._started: dict[int, Started] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, run: int) -> None:
        """Serve orders until the test run is over."""
        with contextlib.suppress(ProcessLookupError):  # it is already over
            run_ended = os.pidfd_open(run)
            woken = wake_on_child()
            self._watch(self._listener, self._connect)
            self._watch(woken, lambda: self._reap(woken))
            self._watch(run_ended, sys.exit)
            while True:
                for key, _ in self._selector.select():
                    key.data()

    def _watch(self, readable: Any, act: Callable[[], None]) -> None:
        self._selector.register(readable, selectors.EVENT_READ, act)

    def _connect(self) -> None:
        orderer, _ = self._listener.accept()
        self._watch(orderer, lambda: self._obey(orderer))

    def _obey(self, orderer: socket.socket) -> None:
        try:
            text, descriptors, _, _ = socket.recv_fds(orderer, LARGEST_ORDER, MAX_DESCRIPTORS)
        except ConnectionError:
            text, descriptors = b"", []
        if text:
            self._start(orderer, json.loads(text), descriptors)
            return
        for pid, started in self._started.items():
            if started.orderer is orderer:
                os.kill(pid, started.death_signal)
        self._selector.unregister(orderer)
        orderer.close()

    def _start(self, orderer: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            become(order, descriptors, self._listener.getsockname())
        for descriptor in (*descriptors, writer):
            os.close(descriptor)
        # The child closes its end after `setsid`. Before that, a signal to its group would end this process.
        os.read(reader, 1)
        os.close(reader)
        self._started[pid] = Started(orderer, order["death_signal"])
        tell(orderer, pid)

    def _reap(self, woken: int) -> None:
        os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                tell(self._started.pop(pid).orderer, status)


def tell(orderer: socket.socket, number: int) -> None:
    """Answer, unless the connection is closed."""
    with contextlib.suppress(OSError):
        orderer.send(b"%d" % number)


def wake_on_child() -> int:
    """Make a pipe that can be read once a child has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer)
    return reader


def preload() -> None:
    """Import the modules that children need."""
    gc.disable()  # imports produce no garbage, and the collector takes a sixth of their time
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread for progress bars
    ours = MODULES if os.environ["PYTHONPATH"] == os.pathsep.join(SOURCES) else ()
    for module in (*ours, *SDK_MODULES):
        importlib.import_module(module)
    if ours:
        build_routes()
        compile_names_of_weights()
        start_groups_without_stacks()
    # a child runs it, as `python -m` does, and must not find an imported one
    for program in PROGRAMS:
        sys.modules.pop(f"{program}.__main__", None)
    ready_to_fork()


def ready_to_fork() -> None:
    """Prepare the process for forks: run no finalizer in a child, and share its memory.

    Raises:
        AssertionError: an imported module has started a thread.
    """
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would lose all but one"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # objects of this process end here, and not in every child: torch has thousands
    gc.enable()
    gc.collect()
    gc.freeze()  # pages that no child's collector touches stay shared


def build_routes() -> None:
    """Build the routes that an API process builds for its first requests, in a fifth of a second."""
    from fastapi.openapi.utils import get_openapi

    from cotrain_server.app import ROUTES

    get_openapi(title="", version="", routes=ROUTES.routes)


def compile_names_of_weights() -> None:
    """Compile the patterns for the weights of all kinds of models, which a worker compiles for its
    first model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")


def start_groups_without_stacks() -> None:
    """Keep torchrun from searching the source of each caller for its records, which takes a second per group."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: ""


if __name__ == "__main__":
    preload()
    Parent(socket.socket(fileno=int(sys.argv[1]))).serve(int(sys.argv[2]))
