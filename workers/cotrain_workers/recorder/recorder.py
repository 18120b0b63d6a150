"""The flight recorder: the last cycles of a worker, each whole in a file, to be run again elsewhere.

What a cycle is made of is written before it runs, so that one which kills its process is there, too.
A disk that is full costs recordings and nothing else. See docs/operate/recorder.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import QueuedOp, Step
from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.ops import HostOptimizer, HostWeights, Output, WeightsMissing
from cotrain_workers.engine.trainer import Trainer
from cotrain_workers.fingerprints import fingerprint_of, fingerprint_of_state
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


class Recorder:
    """Records the cycles of one worker; keeps the last `kept` in `folder`, its own; 0 records nothing."""

    def __init__(
        self,
        engine: Trainer,
        checkpoints: Checkpoints,
        folder: Path,
        *,
        pool: str,
        base_model: str,
        epoch: int,
        kept: int,
    ) -> None:
        self._engine = engine
        self._checkpoints = checkpoints
        self._folder = folder
        self._pool = pool
        self._base_model = base_model
        self._epoch = epoch
        self._kept = kept
        self._recording: Path | None = None
        if kept:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def begin(self, step: Step, bodies: Mapping[tuple[str, int], bytes]) -> None:
        """Write what a step is made of, just before it runs. Twice is harmless."""
        self._recording = None
        if not self._kept:
            return
        # The epoch: what killed a predecessor is not overwritten by who runs it again.
        path = self._folder / f"{step.cycle:012}-{self._epoch}{SUFFIX}"
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
        """Add what came of the step that began last; call it while the engine has nothing newer."""
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
            pool=self._pool,
            base_model=self._base_model,
            model=self._engine.facts.model,
            numerics=self._engine.facts.numerics,
            step=step,
        )

    def _states(self, step: Step) -> Iterator[tuple[RunId, AdapterState]]:
        for run in dict.fromkeys(op.run for op in step.ops):
            if run in self._engine.adapters:
                yield run, self._engine.adapters.state(run)

    def _read_by(self, ops: Sequence[QueuedOp], bodies: Sequence[bytes]) -> ReadCheckpoints:
        """Fetch the checkpoints that ops are going to read; those that are gone are gone for both."""
        weights: dict[str, HostWeights] = {}
        optimizers: dict[str, HostOptimizer | None] = {}
        for op, body in zip(ops, bodies, strict=True):
            for ref, with_optimizer in checkpoints_of(op, body):
                try:
                    weights[ref] = self._checkpoints.host(ref)
                    if with_optimizer:
                        optimizers[ref] = self._checkpoints.optimizer(ref)
                except WeightsMissing:
                    continue
        return ReadCheckpoints(weights, optimizers)

    def _forget_old(self) -> None:
        for path in sorted(self._folder.glob(f"*{SUFFIX}"))[: -self._kept]:
            path.unlink(missing_ok=True)
