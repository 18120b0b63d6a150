"""Flight recorder: the last cycles of a worker, each complete in a file, for a replay elsewhere.

The inputs of a cycle are written before it runs, so a cycle that kills its process is recorded, too.
A full disk affects recordings only. See docs/operate/recorder.md.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import QueuedOp, Step
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import HostOptimizer, HostWeights, Output, WeightsMissing
from cotrain_workers.fingerprints import fingerprint_of, fingerprint_of_state
from cotrain_workers.group.engine import Trainer
from cotrain_workers.op_codec import Checkpoints
from cotrain_workers.recorder.file import (
    CycleFacts,
    Findings,
    ReadCheckpoints,
    add_findings,
    checkpoints_of,
    write_inputs,
)

log = structlog.get_logger()

SUFFIX = ".zip"


@dataclass
class Recorder:
    """Recorder of one worker's cycles."""

    engine: Trainer
    checkpoints: Checkpoints
    folder: Path
    pool: str
    base_model: str
    epoch: int
    kept: int  # last cycles in `folder`; 0 records nothing
    _recording: Path | None = None

    def __post_init__(self) -> None:
        if self.kept:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, step: Step, bodies: Mapping[tuple[str, int], bytes]) -> None:
        """Write the inputs of a step just before it runs. Idempotent."""
        self._recording = None
        if not self.kept:
            return
        # With the epoch, a re-run does not overwrite the recording of the cycle that killed a predecessor.
        path = self.folder / f"{step.cycle:012}-{self.epoch}{SUFFIX}"
        in_order = [bodies[op.run, op.seq] for op in step.ops]
        try:
            read = self._read_by(step.ops, in_order)
            write_inputs(path, self._facts(step), in_order, self._states(step), read)
            self._forget_old()
        except OSError as full:
            log.warning("cycle_not_recorded", cycle=step.cycle, reason=str(full))
        else:
            self._recording = path

    def finish(self, step: Step, outputs: Mapping[tuple[str, int], Output]) -> None:
        """Add the outcome of the step that began last. Call it before the engine runs anything newer."""
        if self._recording is None:
            return
        found = Findings(
            {
                (op.run, op.seq): fingerprint_of(outputs[op.run, op.seq])
                for op in step.ops
                if (op.run, op.seq) in outputs
            },
            {run: fingerprint_of_state(state) for run, state in self._states(step)},
        )
        try:
            add_findings(self._recording, found)
        except OSError as full:
            log.warning("cycle_not_recorded", cycle=step.cycle, reason=str(full))
        self._recording = None

    def _facts(self, step: Step) -> CycleFacts:
        return CycleFacts(
            recorded_at=time.time(),
            pool=self.pool,
            base_model=self.base_model,
            model=self.engine.facts.model,
            numerics=self.engine.facts.numerics,
            step=step,
        )

    def _states(self, step: Step) -> Iterator[tuple[RunId, AdapterState]]:
        for run in dict.fromkeys(op.run for op in step.ops):
            if run in self.engine.adapters:
                yield run, self.engine.adapters.state(run)

    def _read_by(self, ops: Sequence[QueuedOp], bodies: Sequence[bytes]) -> ReadCheckpoints:
        """Return the checkpoints that ops will read. Missing ones are left out; they are missing for the ops, too."""
        weights: dict[str, HostWeights] = {}
        optimizers: dict[str, HostOptimizer | None] = {}
        for op, body in zip(ops, bodies, strict=True):
            for ref, with_optimizer in checkpoints_of(op, body):
                try:
                    weights[ref] = self.checkpoints.host(ref)
                    if with_optimizer:
                        optimizers[ref] = self.checkpoints.optimizer(ref)
                except WeightsMissing:
                    continue
        return ReadCheckpoints(weights, optimizers)

    def _forget_old(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}"))[: -self.kept]:
            path.unlink(missing_ok=True)
