"""What the members of a group say to each other, over gloo: orders and answers, and what they agree on."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from cotrain_workers.engine.device import DeviceLost
from cotrain_workers.group.messages import Answer, Order

#: A member waits for its next order for as long as no request comes. That the first one has died it learns at
#: once, by the end of their connection; that it hangs, the first one's own waiting ends.
NEVER = timedelta(days=3650)


class GroupLost(DeviceLost):
    """A member is gone, or does not answer: this process cannot compute any more."""


def is_member() -> bool:
    """Tell whether torchrun has started this process."""
    return "LOCAL_RANK" in os.environ


class Links:
    """The connections of one member; for its main thread."""

    def __init__(self, device: str, timeout_s: float) -> None:
        """Meet the others; weights go over NCCL between GPUs, all else over gloo.

        Whatever takes longer than `timeout_s` between two members ends the group.
        """
        if (
            sys.platform == "linux"
        ):  # all members are on this host, and what they say is not for others
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        self.number: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        # The first member gives up: one that hangs while it has nothing to do takes no order.
        to_order = timeout if self.number == 0 else NEVER
        self._orders = dist.new_group(backend="gloo", timeout=to_order)
        self._loads = dist.new_group(backend="gloo", timeout=NEVER)
        self._answers = dist.new_group(backend="gloo", timeout=timeout)
        self._pids: list[Any] = [None] * self.size
        dist.all_gather_object(self._pids, os.getpid(), group=self._answers)

    @property
    def others(self) -> range:
        """Return the numbers of those that follow the first member."""
        return range(1, self.size)

    def order(self, member: int, order: Order) -> None:
        """Ask a member for something."""
        dist.send_object_list([order], dst=member, group=self._orders)

    def await_order(self) -> Order:
        """Wait for what the first member asks for."""
        order: Order = self._received(0, self._orders)
        return order

    def answer(self, answer: Answer) -> None:
        """Answer the first member's order."""
        dist.send_object_list([answer], dst=0, group=self._answers)

    def await_answer(self, member: int) -> Answer:
        """Wait for what a member makes of its order."""
        answer: Answer = self._received(member, self._answers)
        return answer

    def agree(self, *wanted: int) -> list[int]:
        """Return the greatest of each number that a member wants; every member asks, in the same order."""
        agreed = torch.tensor(wanted)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._answers)
        return agreed.tolist()

    def await_all(self) -> None:
        """Wait for all members, however long that takes."""
        dist.barrier(group=self._loads)

    def end_others(self) -> None:
        """Kill the other members, on this host like this one: none can go on, and one that hangs hears nothing."""
        for pid in self._pids:
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Part in good order."""
        dist.destroy_process_group()

    def _received(self, member: int, group: Any) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=member, group=group)
        return received[0]
