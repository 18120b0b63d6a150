"""Engine of a group, with the interface of `Engine`. Each run's ops go to the member with its adapter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TypeAlias

from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.engine import Engine, ProcessUse
from cotrain_workers.engine.facts import ModelFacts
from cotrain_workers.engine.ops import CycleOutput, Op, UpcomingBatch
from cotrain_workers.engine.spec import Target
from cotrain_workers.group.bank import GroupBank
from cotrain_workers.group.followers import Followers, run_cycle
from cotrain_workers.group.links import GroupLost
from cotrain_workers.group.lock_step import GroupLockStep


class GroupEngine:
    """Stand-in of `Engine` for the first member. Not thread-safe.

    An exception of any member leaves the others in the middle of a pass. It therefore ends the group and this
    process (GroupLost). The next group finds the open step and its crash count.
    """

    def __init__(self, own: Engine, lock_step: GroupLockStep) -> None:
        self._own = own
        self._lock_step = lock_step
        self.followers = Followers(lock_step.links)
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
        """Run one cycle like `Engine.cycle`, on all members at once. Raises GroupLost."""
        own, *others = [
            (share, {op: n for op, n in allowances.items() if op[0] in {o.run for o in share}})
            for share in self.adapters.shares(ops)
        ]
        self.followers.send({n: (run_cycle, other) for n, other in enumerate(others, start=1)})
        try:
            output = yield from self._lock_step.run(self._own, *own, is_over)
        except BaseException as error:
            raise self.followers.lose(error) from error
        return together([output, *self.followers.collect().values()])

    def watch_micro_batches(self, watch: Callable[[UpcomingBatch], AbstractContextManager[None]]) -> None:
        """Do nothing: each member has its own micro-batches, and the end of any member ends the group."""

    def spare_memory(self, tokens: int) -> None:
        """Do nothing: all members must run the same kinds of passes."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device or the group has failed."""
        if self.followers.lost:
            raise GroupLost(self.followers.lost)
        self._own.check_device()

    @property
    def facts(self) -> ModelFacts:
        """Public facts about the base model and this engine."""
        return self._own.facts

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Runs and memory of each member; of the others as of their last answers. Any thread may read it."""
        others = [ProcessUse(len(each.runs), each.memory_bytes) for each in self.followers.facts]
        return (*self._own.processes, *others)

    @property
    def targets(self) -> Sequence[Target]:
        """Modules that adapters can be attached to."""
        return self._own.targets

    @property
    def halvings(self) -> int:
        """Number of halved micro-batches. It stays 0: a micro-batch that does not fit into memory ends the group."""
        return self._own.halvings

    @property
    def safe_tokens(self) -> int:
        """Maximum tokens of one pass of the base model on each member."""
        return self._own.safe_tokens

    @property
    def device_memory(self) -> tuple[int, int]:
        """Bytes in use and total bytes of the first member's device."""
        return self._own.device_memory


#: Engine of a worker: of this process, or of a group.
Trainer: TypeAlias = Engine | GroupEngine


class GroupOpenPasses:
    """Open passes of all members."""

    def __init__(self, adapters: GroupBank) -> None:
        self._adapters = adapters

    def __contains__(self, op_id: object) -> bool:
        return any(op_id in facts.open_passes for facts in self._adapters.members)

    @property
    def runs(self) -> frozenset[str]:
        """Runs with an open pass."""
        return frozenset(run for facts in self._adapters.members for run, _ in facts.open_passes)


def together(outputs: Sequence[CycleOutput]) -> CycleOutput:
    """Return the combined output of one cycle; the members ran concurrently, so times are maxima."""
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
