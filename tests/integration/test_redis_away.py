"""Redis that is away around a commit, or refuses for a while: a worker reloads its state from the log."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from cotrain_store import redis_keys
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client import connection
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.sampling.claims import ClaimedSample, SampleClaims
from cotrain_workers.engine.engine import Engine
from cotrain_workers.worker import membership
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.http_api import pass_body, running_api
from tests.support.program import LORA, PROGRAM, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import LONG, base_sampler, sample, sampled, saved_sampler, submit_sample
from tests.support.stack import POOL, Home, Stack, make_worker, snapshots, stack, worker

#: In several steps of the decoder, so that others are claimed and looked for between them.
SOME = replace(LONG, max_tokens=24)


def unreliable(execution: Any, method: str, *, losses: float, then_does: bool, lost: Callable[[], None]) -> None:
    """Lose the connection in the first calls of a method: before its effect, or after it."""
    original = getattr(execution, method)
    calls = 0

    def unsure(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > losses:
            return original(*args, **kwargs)
        if then_does:
            original(*args, **kwargs)
        lost()
        raise RedisConnectionError("lost")

    setattr(execution, method, unsure)


@pytest.mark.parametrize("then_does", [variant(False), True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["commit", "bodies", "position", "register_snapshot"])
async def test_a_lost_connection_applies_nothing_twice(
    server: Stack, engine: Engine, method: str, then_does: bool
) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=snapshots(ops=2)) as loop:
        lossy: dict[str, Any] = {"losses": 2, "then_does": then_does, "lost": lambda: None}
        role = loop._execution if hasattr(Execution, method) else loop._execution.logs
        unreliable(role, method, **lossy)
        assert await results(server, run, await submit(server, run, 1, len(PROGRAM))) == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert restored_digest(server, engine, run.id) == digest


@pytest.mark.parametrize("then_does", [False, True], ids=["before", "after"])
async def test_a_worker_that_stops_while_redis_is_away_copies_out_nothing_ahead_of_the_log(
    server: Stack, engine: Engine, then_does: bool
) -> None:
    expected, digest = await undisturbed(server, engine, last=4)
    run = await server.create("a", "a", LORA)
    loop, opened = make_worker(server, engine)
    life = asyncio.create_task(asyncio.to_thread(loop.run))
    answers = await results(server, run, await submit(server, run, 1, 3))
    unreliable(loop._execution, "commit", losses=float("inf"), then_does=then_does, lost=loop.stop)
    requests = await submit(server, run, 4, 4)
    await life
    opened.close()
    with worker(server, engine):
        assert answers + await results(server, run, requests) == expected
    assert restored_digest(server, engine, run.id) == digest


async def test_a_worker_leaves_in_order_without_redis(tmp_path: Path, engine: Engine) -> None:
    with EmbeddedRedis() as redis_server:
        async with stack(redis_server.url, tmp_path) as server:
            run = await server.create("a", "a", LORA)
            loop, opened = make_worker(server, engine)
            life = asyncio.create_task(asyncio.to_thread(loop.run))
            await results(server, run, await submit(server, run, 1, 1))
            await asyncio.to_thread(redis_server.kill)
            loop.stop()
            await asyncio.wait_for(life, 300)
            opened.close()
            redis_server.restart()


async def test_training_goes_on_with_the_same_numbers_across_kills_and_stalls_of_redis(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection._SETTINGS, "socket_timeout", 0.2)
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path) as server:
            expected, digest = await undisturbed(server, engine)
            run = await server.create("a", "a", LORA)
            with worker(server, engine, tuning=snapshots(ops=3)):
                answers = []
                for seq in range(1, len(PROGRAM) + 1):
                    (request,) = await submit(server, run, seq, seq)
                    if seq % 5 == 0:
                        await asyncio.to_thread(redis_server.kill)
                        await asyncio.to_thread(redis_server.restart)
                    if seq % 5 == 3:
                        redis_server.stand_still()
                        await asyncio.sleep(0.5)  # longer than the time limit of each call
                        redis_server.go_on()
                    answers += await results(server, run, [request])
            assert answers == expected
            assert engine.adapters.state(run.id).digest() == digest


async def test_a_scheduler_and_a_worker_find_each_other_again_after_a_long_absence(
    tmp_path: Path, engine: Engine
) -> None:
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path) as server:
            with worker(server, engine):
                run = await server.create("a", "a", LORA)
                await results(server, run, await submit(server, run, 1, 1))
                await asyncio.to_thread(redis_server.kill)
                await asyncio.sleep(1.0)  # longer than every connection's own retries last
                await asyncio.to_thread(redis_server.restart)
                await results(server, run, await submit(server, run, 2, 4))


async def test_a_replaced_worker_ends_and_leaves_the_step_to_its_successor(
    server: Stack, engine: Engine, redis: Any
) -> None:
    expected, digest = await undisturbed(server, engine)
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, len(PROGRAM))
    async with dying_worker(server, engine, Failpoint("commit", 2)) as old:
        pass
    with worker(server, engine):
        assert await results(server, run, requests) == expected
        before = redis.hgetall(redis_keys.log(POOL, run.id))
        assert old._execution.epoch < int(redis.get(redis_keys.worker_epoch(POOL, old._execution.worker)))
    assert redis.hget(redis_keys.log(POOL, run.id), "done") == before[b"done"]
    assert engine.adapters.state(run.id).digest() == digest


@pytest.mark.parametrize("then_does", [variant(False), True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["claim", "resolve", "cancelled", "weights", "mark_stored"])
async def test_a_lost_connection_loses_no_sample_and_no_weights(
    server: Stack, engine: Engine, method: str, then_does: bool
) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await submit(server, run, 1, 4)
        expected = await sample(server, await saved_sampler(server, run, 5), 0, SOME)
    with worker(server, engine) as loop:
        lossy: dict[str, Any] = {"losses": 2, "then_does": then_does, "lost": lambda: None}
        role = loop._sampler._sampling if hasattr(SampleClaims, method) else loop._weights._saved
        unreliable(role, method, **lossy)
        sampler = await saved_sampler(server, run, 6, number=1)
        requests = [await submit_sample(server, sampler, seq, SOME) for seq in range(4)]
        for request in requests:
            assert await sampled(server, sampler, request) == expected
        async with asyncio.timeout(300):
            while loop._weights._unstored:  # noqa: ASYNC110  # another thread's doing
                await asyncio.sleep(0.01)


async def test_requests_whose_claim_was_never_answered_are_claimed_again(server: Stack, engine: Engine) -> None:
    sampler = await base_sampler(server)
    with worker(server, engine) as loop:
        sampling, lost = loop._sampler._sampling, 0
        claim_as_before = sampling.claim

        def claim(*most: Any) -> list[ClaimedSample]:
            nonlocal lost
            claimed = claim_as_before(*most)
            if claimed and lost < 3:
                lost += 1
                raise RedisConnectionError("lost")
            return claimed

        sampling.claim = claim  # type: ignore[method-assign,assignment]  # one that fails
        requests = [await submit_sample(server, sampler, seq) for seq in range(5)]
        answers = {await sampled(server, sampler, request) for request in requests}
        assert (lost, len(answers)) == (3, 1)


class Crowded:
    """A Redis that has no memory left when something is called, and again later."""

    def __init__(self, redis_server: EmbeddedRedis) -> None:
        self._redis = open_sync_connection(redis_server.url)
        self._memory = self._redis.config_get("maxmemory")["maxmemory"]
        self.refused = 0

    def until_asked_twice_more(self, role: Any, method: str) -> None:
        """Remove the free memory during the next calls of a method."""
        original = getattr(role, method)

        def crowded(*args: Any, **kwargs: Any) -> Any:
            self._redis.config_set("maxmemory", 1 if self.refused < 2 else self._memory)
            self.refused += 1
            return original(*args, **kwargs)

        setattr(role, method, crowded)


async def test_a_commit_waits_for_a_redis_that_has_no_memory_left(
    server: Stack, empty_redis: EmbeddedRedis, engine: Engine
) -> None:
    run = await server.create("a", "a", LORA)
    crowded = Crowded(empty_redis)
    with worker(server, engine) as loop:
        crowded.until_asked_twice_more(loop._execution, "commit")
        await results(server, run, await submit(server, run, 1, 1))
    assert crowded.refused >= 3


async def test_a_worker_gives_signs_of_life_again_once_redis_has_memory(
    empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.05)
    crowded = Crowded(empty_redis)
    with worker(Home(empty_redis.url, tmp_path), engine) as loop:
        crowded.until_asked_twice_more(loop._execution, "heartbeat")
        async with asyncio.timeout(60):
            while crowded.refused < 3:  # noqa: ASYNC110  # another thread's doing
                await asyncio.sleep(0.01)


async def test_the_scheduler_waits_for_a_redis_that_has_no_memory_left(
    server: Stack, empty_redis: EmbeddedRedis, engine: Engine
) -> None:
    run = await server.create("a", "a", LORA)
    crowded = Crowded(empty_redis)
    crowded.until_asked_twice_more(server.dispatch, "plan")
    with worker(server, engine):
        await results(server, run, await submit(server, run, 1, 2))
    assert crowded.refused >= 3


@contextlib.contextmanager
def read_only(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection:
        connection.replicaof("127.0.0.1", "1")
        try:
            yield
        finally:
            connection.replicaof("NO", "ONE")


@contextlib.contextmanager
def with_a_failing_disk(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection:
        connection.config_set("save", "3600 1")
        connection.config_set("rdbcompression", "no")
        folder = connection.config_get("dir")["dir"]
        file = f"{folder}/{connection.config_get('dbfilename')['dbfilename']}"
        with as_a_folder(file):
            connection.bgsave()
            while connection.info("persistence")["rdb_last_bgsave_status"] == "ok":
                time.sleep(0.01)
        try:
            yield
        finally:
            connection.config_set("save", "")


@contextlib.contextmanager
def as_a_folder(file: str) -> Iterator[None]:
    """Replace a file that Redis writes by a folder, so that writing fails."""
    path = Path(file)
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "full").touch()
    try:
        yield
    finally:
        (path / "full").unlink()
        path.rmdir()


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as connection, redis.Redis.from_url(url) as other:
        connection.config_set("lua-time-limit", 1)

        def loop() -> None:
            with contextlib.suppress(RedisError):  # it is killed
                other.eval("while true do end", 0)

        script = threading.Thread(target=loop)
        script.start()
        try:
            while True:
                try:
                    connection.ping()
                except RedisError:
                    break
            yield
        finally:
            connection.script_kill()
            script.join()


REFUSING = {"READONLY": read_only, "MISCONF": with_a_failing_disk, "BUSY": busy}
REASONS = {
    "READONLY": "Redis is a replica, and takes no writes.",
    "MISCONF": "Redis could not write its last snapshot, and takes no writes (MISCONF).",
    "BUSY": "Redis takes nothing for now: ",
}


@pytest.fixture(scope="module")
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.mark.parametrize("code", REFUSING)
async def test_a_request_is_answered_503_and_taken_afterwards(own_redis: EmbeddedRedis, code: str) -> None:
    own_redis.flush()
    async with running_api(own_redis.url) as api:
        run = await api.new_run()
        with REFUSING[code](own_redis.url):
            refused = await api.post("forward_backward", pass_body(run, 1))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["code"] == "store_unavailable"
            session = await api.post("create_session", {})
            assert (session.status_code, session.headers["retry-after"]) == (503, "1")
            reasons = (await api.http.get("/readyz")).json()["reasons"]
            assert any(reason.startswith(REASONS[code]) for reason in reasons), reasons
        taken = await api.post("forward_backward", pass_body(run, 1))
        assert taken.json()["request_id"] == f"{run}:1"


async def test_training_continues_with_the_same_numbers_after_each_error(
    own_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    own_redis.flush()
    url = own_redis.url
    async with stack(url, tmp_path) as server:
        expected, digest = await undisturbed(server, engine)
        run = await server.create("a", "a", LORA)
        with worker(server, engine, tuning=snapshots(ops=3)):
            answers = []
            for seq in range(1, len(PROGRAM) + 1):
                (request,) = await submit(server, run, seq, seq)
                if seq % 4 == 1 and seq // 4 < len(REFUSING):
                    with [*REFUSING.values()][seq // 4](url):
                        await asyncio.sleep(0.3)
                answers += await results(server, run, [request])
        assert answers == expected
        assert engine.adapters.state(run.id).digest() == digest
