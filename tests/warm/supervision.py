"""Supervisors whose children are forked from the warm parent, as the supervisor itself was."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cotrain_server.supervisor import process
from tests.warm.popen import is_same, order, read_command


def have_children_forked(address: Any) -> None:
    """Replace the function by which a supervisor in this process starts its children."""
    process._exec = partial(_exec, process._exec, address)


async def _exec(
    start: Any,
    address: Any,
    arguments: Sequence[str],
    *,
    stdin: int,
    output: int,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> Any:
    """Fork Python programs of ours that have a tether to their supervisor; start all others."""
    tether, *tethered = arguments
    what = read_command(tethered[2:]) if tether == str(process.EXEC_WITH_PARENT) else None
    own_path = os.environ.get("PYTHONPATH")  # set for the supervisor, which was forked with it
    theirs = {name: value for name, value in env.items() if (name, value) != ("PYTHONPATH", own_path)}
    if what is None or not is_same(theirs):
        return await start(arguments, stdin=stdin, output=output, env=env, pass_fds=pass_fds)
    orderer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orderer.connect(address)
    nothing = os.open(os.devnull, os.O_RDONLY)
    descriptors = {0: nothing, 1: output, 2: output, **{number: number for number in pass_fds}}
    pid = order(orderer, what, descriptors, env, new_session=True, death_signal=int(tethered[1]))
    os.close(nothing)
    return Forked(pid, orderer)


class Forked:
    """The part of `asyncio.subprocess.Process` that a supervisor uses."""

    def __init__(self, pid: int, orderer: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._orderer = orderer
        self._ended = asyncio.create_task(self._end())

    async def wait(self) -> int:
        """Wait until it has ended."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    async def _end(self) -> int:
        self._orderer.setblocking(False)
        told = await asyncio.get_running_loop().sock_recv(self._orderer, 64)
        self._orderer.close()
        self.returncode = os.waitstatus_to_exitcode(int(told))
        return self.returncode
