"""Processes of a group: their launch with torchrun, and the connections between them over gloo.

torchrun's agent starts, watches and ends the processes. The launcher converts their exit codes to one for a
supervisor.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import structlog
import torch
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cotrain_workers.engine.device import EXIT_CODE, DeviceLost

log = structlog.get_logger()

HERE = "127.0.0.1"
PR_SET_PDEATHSIG = 1
#: Time in s for the other members to end after one has crashed. Their state is replayed.
LAST_S = 3
#: Exit codes with a meaning for a supervisor; any other end is a crash.
_KNOWN_CODES = (2, EXIT_CODE)
#: Time for which a member waits for its next order. The pool may be idle that long. If the first member crashes,
#: the closed connection ends the wait at once. If a member hangs, the first member's own timeout ends the group.
NEVER = timedelta(days=3650)


def launch(size: int, member: Callable[[], None]) -> int:
    """Run `member` in `size` processes until all have returned, and return an exit code.

    The processes are forked, so that libraries are imported once. Call it before any use of a device. A stop
    signal is for the first member, which ends the others. The crash of a member ends all members.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _pass_on)
    with tempfile.TemporaryDirectory(prefix="cotrain-group-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{HERE}:0",
            local_addr=HERE,
            max_restarts=0,  # a supervisor decides on restarts
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
            shutdown_timeout=LAST_S,
        )
        try:
            elastic_launch(config, _tied)(os.getpid(), member)
        except ChildFailedError as failed:
            codes = {failure.exitcode for failure in failed.failures.values()}
            log.error("group_ended", exit_codes=sorted(codes))
            return next((code for code in _KNOWN_CODES if code in codes), 1)
    return 0


def _pass_on(signum: int, _: object) -> None:
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signum)


def _tied(launcher: int, member: Callable[[], None]) -> None:
    """Run a member that cannot outlive its launcher."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the first member has its own way to stop
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        sys.exit(1)
    member()


class GroupLost(DeviceLost):
    """Failure of a group: a member has ended or does not answer, and this process must restart."""


class Links:
    """Connections of one member, for its main thread."""

    def __init__(self, device: str, timeout_s: float) -> None:
        """Connect to the other members. Weights use NCCL between GPUs; everything else uses gloo.

        An exchange between two members that takes longer than `timeout_s` ends the group.
        """
        # All members are on this host, and their messages must not leave it.
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        self.number: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        # The first member stops waiting: a hung idle member does not accept an order.
        to_order = timeout if self.number == 0 else NEVER
        self._orders = dist.new_group(backend="gloo", timeout=to_order)
        self._loads = dist.new_group(backend="gloo", timeout=NEVER)
        self._answers = dist.new_group(backend="gloo", timeout=timeout)
        self._pids: list[Any] = [None] * self.size
        dist.all_gather_object(self._pids, os.getpid(), group=self._answers)

    @property
    def others(self) -> range:
        """Numbers of the followers."""
        return range(1, self.size)

    def order(self, member: int, order: object) -> None:
        """Send an order to a member."""
        dist.send_object_list([order], dst=member, group=self._orders)

    def await_order(self) -> Any:
        """Wait for the next order of the first member."""
        return self._received(0, self._orders)

    def answer(self, answer: object) -> None:
        """Answer the first member's order."""
        dist.send_object_list([answer], dst=0, group=self._answers)

    def await_answer(self, member: int) -> Any:
        """Wait for a member's answer to its order."""
        return self._received(member, self._answers)

    def agree(self, *wanted: int) -> list[int]:
        """Return the maximum over all members of each number. Every member must call it, in the same order."""
        agreed = torch.tensor(wanted)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._answers)
        return agreed.tolist()

    def await_all(self) -> None:
        """Wait for all members, without a timeout."""
        dist.barrier(group=self._loads)

    def end_others(self) -> None:
        """Kill the other members, which are on this host. None can continue, and a hung one reads no order."""
        for pid in self._pids:
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()

    def _received(self, member: int, group: Any) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=member, group=group)
        return received[0]
