"""The engine of a group, which the worker uses like any other: each run's ops go to the member that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType

from cotrain_workers.engine.cycle import Yielding, run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model_facts import ModelFacts
from cotrain_workers.engine.ops import CycleOutput, Op, UpcomingBatch
from cotrain_workers.engine.spec import Target
from cotrain_workers.engine.trainer import ProcessUse
from cotrain_workers.group.bank import GroupBank
from cotrain_workers.group.followers import Followers
from cotrain_workers.group.links import GroupLost, Links
from cotrain_workers.group.lock_step import GroupLockStep
from cotrain_workers.group.messages import RunCycle


class GroupEngine:
    """Implements `Trainer` for the first member. Not thread-safe.

    An exception of any member leaves the others in the middle of a pass: it ends the group, and with it the
    process (GroupLost). The next group finds the step open, and how often it crashed.
    """

    def __init__(self, own: Engine, links: Links, lock_step: GroupLockStep) -> None:
        self._own = own
        self._lock_step = lock_step
        self.followers = Followers(links)
        self.adapters = GroupBank(own, self.followers)
        self.open_passes = GroupOpenPasses(self.adapters)

    def run(self, ops: Sequence[Op]) -> CycleOutput:
        """Run one cycle to its end; see `cycle`."""
        return run_to_end(self.cycle(ops))

    def cycle(
        self,
        ops: Sequence[Op],
        allowances: Mapping[tuple[str, int], int] = MappingProxyType({}),
        is_over: Callable[[], bool] = lambda: False,
    ) -> Yielding[CycleOutput]:
        """Run one cycle; as `Engine.cycle`, on all members at once. Raises GroupLost."""
        own, *others = [
            RunCycle(
                share, {op: n for op, n in allowances.items() if op[0] in {o.run for o in share}}
            )
            for share in self.adapters.shares(ops)
        ]
        self.followers.send(dict(enumerate(others, start=1)))
        try:
            output = yield from self._lock_step.run(self._own, own.ops, own.allowances, is_over)
        except BaseException as error:
            raise self.followers.lose(error) from error
        return together([output, *self.followers.collect().values()])

    def watch_micro_batches(
        self, watch: Callable[[UpcomingBatch], AbstractContextManager[None]]
    ) -> None:
        """Watch nothing: each member has micro-batches of its own, and one that ends ends the group."""

    def spare_memory(self, tokens: int) -> None:
        """Change nothing: all members run the same kinds of passes."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device, or the group, cannot compute any more."""
        if self.followers.lost:
            raise GroupLost(self.followers.lost)
        self._own.check_device()

    @property
    def facts(self) -> ModelFacts:
        """What other processes may know."""
        return self._own.facts

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Return what each member holds, the others as of their last answers. Any thread may ask."""
        others = [ProcessUse(len(each.runs), each.memory_bytes) for each in self.followers.facts]
        return (*self._own.processes, *others)

    @property
    def targets(self) -> Sequence[Target]:
        """Return the modules that adapters can be attached to."""
        return self._own.targets

    @property
    def halvings(self) -> int:
        """Return 0: a micro-batch that does not fit into memory ends the group."""
        return self._own.halvings

    @property
    def safe_tokens(self) -> int:
        """Return how many tokens one pass of the base model has room for on each member."""
        return self._own.safe_tokens

    @property
    def device_memory(self) -> tuple[int, int]:
        """Return the bytes in use on the first member's device, and all it has."""
        return self._own.device_memory


class GroupOpenPasses:
    """Implements `Open` over all members."""

    def __init__(self, adapters: GroupBank) -> None:
        self._adapters = adapters

    def __contains__(self, op_id: object) -> bool:
        return any(op_id in facts.open_passes for facts in self._adapters.members)

    @property
    def runs(self) -> frozenset[str]:
        """Return the runs that have one."""
        return frozenset(run for facts in self._adapters.members for run, _ in facts.open_passes)


def together(outputs: Sequence[CycleOutput]) -> CycleOutput:
    """Sum up what the members did in one cycle; they ran side by side."""
    return CycleOutput(
        outputs={at: each for output in outputs for at, each in output.outputs.items()},
        forwards=max(output.forwards for output in outputs),
        tokens=sum(output.tokens for output in outputs),
        padded_tokens=sum(output.padded_tokens for output in outputs),
        wave_s=max(output.wave_s for output in outputs),
        optim_s=max(output.optim_s for output in outputs),
        is_exact=all(output.is_exact for output in outputs),
        divided={at: each for output in outputs for at, each in output.divided.items()},
        parts=outputs[0].parts,
    )
