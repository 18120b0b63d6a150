"""Two real schedulers, of which the leading one is stopped for a while: each op is planned once."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import asdict
from pathlib import Path

from cotrain_store import redis_keys
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring.fleet import read_fleet
from tests.support.log import WORKER, Log
from tests.support.processes import PATIENCE_S, Process
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL


async def ran(log: Log, run: RunRecord, seq: int) -> int:
    """Commit an op once somebody has planned it, and name its cycle."""
    async with asyncio.timeout(PATIENCE_S):
        while not (steps := log.execution.open_steps()):
            await asyncio.to_thread(log.execution.wait, 1.0)
    [step] = steps
    assert [(op.run, op.seq) for op in step.ops] == [(run.id, seq)]
    log.commit(step)
    return step.cycle


async def test_a_stopped_leader_is_replaced_and_plans_nothing_when_it_wakes(
    log: Log, empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    beat = WorkerHeartbeat(WORKER, log.execution.epoch, "serving", "cpu", 1e5, 0, 0, 0.0)
    log.redis.set(redis_keys.worker(POOL, WORKER), json.dumps(asdict(beat)))
    await log.dispatch.resign()
    epoch = log.dispatch.epoch
    settings = {"COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path)}
    with Process("cotrain_scheduler", settings, tmp_path / "first.log") as first:
        run = await log.new_run()
        cycles = [await ran(log, run, 0)]
        assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 1
        first.send(signal.SIGSTOP)
        with Process("cotrain_scheduler", settings, tmp_path / "second.log") as second:
            await log.submit(run, 1)
            cycles.append(await ran(log, run, 1))
            assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 2
            first.send(signal.SIGCONT)
            await log.submit(run, 2)
            cycles.append(await ran(log, run, 2))
            assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 2
            await asyncio.to_thread(second.kill)
            await log.submit(run, 3)
            cycles.append(await ran(log, run, 3))
        assert (await read_fleet(log.connection)).scheduler_epoch == epoch + 3
        await asyncio.to_thread(first.stop)
    assert cycles == [1, 2, 3, 4]
    assert log.queued() == (0, 0, 0)
