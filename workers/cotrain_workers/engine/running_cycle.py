"""One cycle while it runs: what limits it, and what has come of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cotrain_workers.engine.ops import CycleOutput, CyclePart, Output, Progress
from cotrain_workers.engine.training.micro_batches import PassesCost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cotrain_workers.engine.training.pass_state import PassState


@dataclass
class RunningCycle:
    """What the groups and waves of a cycle add to."""

    allowances: Mapping[tuple[str, int], int]
    is_over: Callable[[], bool]
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    divided: dict[tuple[str, int], Progress] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)  # runs of which nothing more runs in this cycle
    cost: PassesCost = field(default_factory=PassesCost)
    optim_s: float = 0.0
    is_exact: bool = True
    parts: list[CyclePart] = field(default_factory=list)

    def note(self, state: PassState) -> None:
        """Take what came of a pass that ran, as far as it did."""
        op_id = (state.op.run, state.op.seq)
        if state.output is None:
            self.deferred.add(state.op.run)
        else:
            self.outputs[op_id] = state.output
            self.is_exact = self.is_exact and state.is_exact
        if state.output is None or state.rows_before:
            self.divided[op_id] = Progress(state.rows_now, state.rows)

    def output(self) -> CycleOutput:
        """Sum the cycle up."""
        return CycleOutput(
            outputs=self.outputs,
            forwards=self.cost.forwards,
            tokens=self.cost.tokens,
            padded_tokens=self.cost.padded_tokens,
            wave_s=self.cost.seconds,
            optim_s=self.optim_s,
            is_exact=self.is_exact,
            divided=self.divided,
            parts=tuple(self.parts),
        )
