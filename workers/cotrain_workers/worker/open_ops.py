"""What a worker keeps of passes that take several steps, next to what its engine keeps of them.

The request, so that no body is read and decoded again; and the computing time, which is its tenant's in
the commit that resolves it, once: what a crash makes run again was never counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from cotrain_store.messages.ids import OpId
    from cotrain_store.messages.ops import QueuedOp
    from cotrain_workers.engine.ops import Op


@dataclass(frozen=True)
class OpenOp:
    """A pass that is open in the engine."""

    body: bytes
    request: Op
    device_s: float = 0.0
    """What its steps took of computing time, so far."""


class OpenOps:
    """The open passes of one worker; what the engine has forgotten is forgotten here."""

    def __init__(self, open_passes: Container[OpId]) -> None:
        self._open_passes = open_passes
        self._ops: dict[OpId, OpenOp] = {}

    def begin_step(self) -> None:
        """Forget passes that are not open any more: they begin anew, or never run again."""
        self._ops = {op_id: op for op_id, op in self._ops.items() if op_id in self._open_passes}

    def find(self, op: QueuedOp) -> OpenOp | None:
        """Return what is kept of an op."""
        return self._ops.get((op.run, op.seq))

    def keep(self, op_id: OpId, body: bytes, request: Op) -> None:
        """Keep a pass that stayed open in the step that runs now."""
        self._ops.setdefault(op_id, OpenOp(body, request))

    @property
    def device_s(self) -> Mapping[OpId, float]:
        """Return the computing time of steps before the one that runs now."""
        return {op_id: op.device_s for op_id, op in self._ops.items()}

    def committed(self, device_s: Mapping[OpId, float]) -> None:
        """Note the computing time of each pass after a step."""
        self._ops = {
            op_id: OpenOp(op.body, op.request, device_s.get(op_id, op.device_s))
            for op_id, op in self._ops.items()
        }
