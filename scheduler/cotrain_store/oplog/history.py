"""Read the history of a run, which its commits wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import run_keys
from cotrain_store.messages.history import read_points

if TYPE_CHECKING:
    from cotrain_store.messages.history import HistoryPoint
    from cotrain_store.messages.ids import RunId
    from cotrain_store.redis_client.connection import Connection


async def read_history(
    connection: Connection, run: RunId, after_step: int = -1
) -> list[HistoryPoint]:
    """Read the points after a step of a run that was found through its tenant, in the order of its log."""
    pipeline = connection.pipeline(transaction=True)  # a rollback cuts both lists at once
    pipeline.lrange(run_keys.steps(run), 0, -1)
    pipeline.lrange(run_keys.evaluations(run), 0, -1)
    steps, evaluations = await pipeline.execute()
    points = read_points("optim_step", steps) + read_points("forward", evaluations)
    return sorted((p for p in points if p.step > after_step), key=lambda point: point.seq)


async def newest_points(connection: Connection, runs: list[RunId]) -> dict[RunId, HistoryPoint]:
    """Read the newest optimizer step of each of these runs; one without a history is left out."""
    pipeline = connection.pipeline(transaction=False)
    for run in runs:
        pipeline.lrange(
            run_keys.steps(run), -2, -1
        )  # what the last stands for, the one before says
    found = zip(runs, await pipeline.execute() if runs else [], strict=True)
    return {run: read_points("optim_step", rows)[-1] for run, rows in found if rows}
