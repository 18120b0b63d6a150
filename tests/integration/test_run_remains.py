"""Data that remains of an unloaded run: its record and the position of its log; nothing else on
disk or in Redis."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, SessionId
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.lives import pass_time
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, snapshots, worker
from tests.support.waiting import until

LORA = LoraSpec(rank=4, seed=7, train_unembed=False)
#: Kept permanently, counted by the quota `record_bytes`; `docs/operate/limits.md` lists them.
REMAINS = ["cotrain:run:<run>", "cotrain:session:<session>:runs", f"cotrain:{{{POOL}}}:log:<run>"]
#: Also kept for a run that trained, under the quota `history_points`.
HISTORY = ["cotrain:run:<run>:history", "cotrain:run:<run>:steps"]


async def train(server: Stack, redis: Any, session: str) -> RunRecord:
    """Make a run with bodies in Redis and in the spool, two snapshots, and unread results."""
    run = await server.create("a", session, LORA)
    for seq, length in ((1, 9), (3, 300)):
        request = await server.forward_backward(run, seq, sequences(seq, 8, length))
        await server.result(run, request)
        await server.result(run, await server.optim_step(run, seq + 1))
    await until(lambda: len(copies_of(redis, run)) == 2)
    return run


def copies_of(redis: Any, run: RunRecord) -> list[bytes]:
    files = redis.hmget(f"cotrain:{{{POOL}}}:log:{run.id}", "snapfile", "oldfile")
    return [file for file in files if file]


def described(redis: Any, run: RunRecord | None = None) -> list[str]:
    """Return all keys; those of a run with placeholders."""
    names = [name.decode() for name in redis.keys("*")]
    if run is None:
        return sorted(names)
    of_run = [name for name in names if run.session in name]
    return sorted(name.replace(run.id, "<run>").replace(run.session, "<session>") for name in of_run)


async def test_an_unloaded_run_leaves_only_its_record(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    tuning = snapshots(ops=1)
    folder = tmp_path / "snapshots"
    with worker(empty_redis.url, tmp_path, engine, tuning=tuning) as loop:
        redis = loop._execution._redis
        first = await train(server, redis, "session-0")
        await server.intake.close_run(first)
        await until(lambda: not list(folder.iterdir()))
        before = [name for name in described(redis) if "session-0" not in name]
        runs = [await train(server, redis, f"session-{number}") for number in (1, 2, 3)]
        await until(lambda: len(list(folder.glob("*/*.safetensors"))) == 6)
        # Only now: a snapshot of it would be a seventh file.
        untrained = await server.create("a", "session-4", LORA)
        for run in (*runs, untrained):
            await server.intake.close_run(run)
        await until(lambda: redis.zcard(redis_keys.run_bytes()) == 0)
        await until(lambda: not list(folder.iterdir()))  # nor does a folder remain
        pass_time(redis, redis_keys.SMALL_RESULT_TTL_MS + 1)
        await until(lambda: not redis.keys("cotrain:result:*"))  # the scheduler expires them
        await until(lambda: described(redis, untrained) == REMAINS)
        for run in runs:
            assert described(redis, run) == sorted(REMAINS + HISTORY)
            assert set(redis.hkeys(f"cotrain:{{{POOL}}}:log:{run.id}")) <= POSITION
        now = [
            name
            for name in described(redis)
            if not re.search(r"session-\d|:minute:", name)  # the minute may have changed
        ]
        assert set(now) <= {*before, *UNREAD}
        assert redis.hlen(redis_keys.spool_segment_refs()) == 0
        assert redis.hlen(redis_keys.spool_results()) == 0
        assert run_ids(redis, SessionId("session-1")) == [runs[0].id]
        for run in runs:
            assert run.id not in engine.adapters


def run_ids(redis: Any, session: SessionId) -> list[RunId]:
    return [RunId(name.decode()) for name in redis.smembers(redis_keys.session_runs(session))]


#: Fields of a deleted log: its position and its owner.
POSITION = {
    b"state", b"tenant", b"next", b"done", b"snap", b"last", b"worker", b"oldsnap",
    b"oldnumerics", b"numerics",
}  # fmt: skip
#: Removed at the next request of their tenant.
UNREAD = ["cotrain:tenant:a:unread", "cotrain:tenant:a:unread_until", "cotrain:tenants:unread"]
