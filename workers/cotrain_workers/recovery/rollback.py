"""Rollback after a disk was lost with a run's newest state, to the newest readable checkpoint.

A rollback is never silent. The run's `weights_epoch` grows, and requests for the lost state fail
with that reason; later ones run.
"""

import structlog
import torch

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId, seq_of
from cotrain_store.messages.runs import RunState
from cotrain_store.messages.saves import CheckpointRecord
from cotrain_store.oplog.execution import Execution
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.ops import WeightsMissing
from cotrain_workers.group.engine import Trainer
from cotrain_workers.recovery.snapshot_file import write_snapshot

log = structlog.get_logger()


def roll_back(
    engine: Trainer, execution: Execution, weights: WeightsStore, snapshots: Blobs, run: RunId
) -> bool:
    """Replace the state of a run as of `done` by its newest readable checkpoint; return False if
    there is none.

    Idempotent: a repeated call finds a readable snapshot.

    Raises:
        OSError: the snapshot cannot be written now.
        Fenced: another process took over this worker id.
    """
    position = execution.logs.position(run)
    if position is None or position.state is RunState.FAILED:
        return False
    for checkpoint in execution.logs.checkpoints(run):
        if seq_of(checkpoint.weights) > position.done:
            continue
        try:
            state = state_of(weights, checkpoint)
        except WeightsMissing:
            continue
        numerics = engine.facts.numerics_id
        snapshot = write_snapshot(snapshots, run, position.done, execution.writer, numerics, state)
        failpoint("worker.before_rollback", run)
        weights_epoch = execution.roll_back(checkpoint, snapshot.file, snapshot.sha256)
        failpoint("worker.after_rollback", run)
        log.error(
            "run_rolled_back", run=run, checkpoint=checkpoint.path, weights_epoch=weights_epoch
        )
        return True
    return False


def state_of(weights: WeightsStore, checkpoint: CheckpointRecord) -> AdapterState:
    """Read the state that a checkpoint was made of, without any gradient pending at that time.

    Raises:
        WeightsMissing: a file of it is missing or damaged.
    """
    adapter, optimizer = weights.host(checkpoint.weights), weights.optimizer(checkpoint.weights)
    zeros = torch.zeros_like(adapter.flat)
    return AdapterState(
        adapter.spec,
        adapter.flat,
        grads=zeros,
        m=optimizer.m if optimizer else zeros,
        v=optimizer.v if optimizer else zeros,
        step=optimizer.step if optimizer else 0,
        grads_pending=False,
    )
