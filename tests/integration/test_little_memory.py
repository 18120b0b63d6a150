"""A worker that runs out of memory: a worker with more memory replays the reduced runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.messages.ops import OpKind, ResultKind
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, worker

LimitRows = Callable[[int], None]


@pytest.fixture
def limit_rows(engine: Engine) -> Iterator[LimitRows]:
    """Make longer rows exceed the memory of the base model, until the end of the test."""
    most, before = [1 << 30], engine.safe_tokens

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > most[0]:
            raise torch.OutOfMemoryError

    def limit(rows: int) -> None:
        most[0] = rows

    hook = engine._base.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
    yield limit
    hook.remove()
    engine._forward_backward.limits.tokens = before


async def test_a_run_split_for_lack_of_memory_resumes_with_more_memory(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any, limit_rows: LimitRows
) -> None:
    """Its last bits differ there, which is no reason to stop the run."""
    url = empty_redis.url
    run = await server.create("a", "a", LORA)
    limit_rows(128)
    with worker(url, tmp_path, engine, drains=False) as loop:
        found = await server.result(run, await server.forward_backward(run, 1, sequences(1, 5, 70)))
        assert found.kind is ResultKind.PASS
        await server.result(run, await server.optim_step(run, 2))
        assert loop._heartbeat._describe().safe_tokens <= 128
    assert redis.hget(redis_keys.log(POOL, run.id), "numerics") == b"mixed"
    limit_rows(1 << 30)
    engine.adapters.drop(run.id)
    with worker(url, tmp_path, engine):
        answer = await server.result(run, await server.optim_step(run, 3))
        assert "grad_norm" in answer.json()["metrics"]


async def test_a_request_that_exceeds_memory_fails_alone_also_in_a_replay(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, limit_rows: LimitRows
) -> None:
    url = empty_redis.url
    expected, digest = await undisturbed(server, url, tmp_path, engine, last=4)
    run = await server.create("a", "a", LORA)
    limit_rows(64)
    with worker(url, tmp_path, engine, drains=False):
        requests = await submit(server, run, 1, 3)
        large = await server.forward_backward(run, 4, sequences(1, 1, 100), OpKind.FORWARD_BACKWARD)
        requests += await submit(server, run, 4, 4, place=5)
        failure = (await server.result(run, large)).json()
        assert failure["error"].startswith("Request needs more memory than the worker has (")
        assert failure["category"] == "server"
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest
    limit_rows(1 << 30)
    assert restored_digest(url, tmp_path, engine, run.id) == digest
