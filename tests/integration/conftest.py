"""Fixtures of the tests that run on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from cotrain_store.redis_client.connection import SyncConnection, open_sync_connection
from cotrain_workers.engine.engine import Engine
from tests.support.http_api import ALICE, Api, running_api
from tests.support.log import Log, open_log
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import Samples, open_samples
from tests.support.stack import Stack, stack
from tests.support.stand_in import StandIn, stand_in
from tests.support.talking import Script, Talking

if TYPE_CHECKING:  # their import takes a second
    import anthropic
    import openai


@pytest.fixture(autouse=True, scope="session")
def plain_tracebacks() -> None:
    """Log as usual, but without the local variables of every frame, which take a second per
    traceback."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])


@pytest.fixture
async def log(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Log]:
    """Log of one pool, driven by the test."""
    async with open_log(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture
async def samples(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Samples]:
    """Sample requests of one pool, driven by the test."""
    async with open_samples(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture
async def api(empty_redis: EmbeddedRedis) -> AsyncIterator[Api]:
    """The whole API in this process."""
    async with running_api(empty_redis.url) as opened:
        yield opened


@pytest.fixture
def worker(api: Api) -> Iterator[StandIn]:
    """Executor of the API's requests, with results given by the test."""
    with stand_in(api.services) as opened:
        yield opened


@pytest.fixture
def script(served: Talking) -> Script:
    """Empty script of the worker of a module's `served` API."""
    served.script.__dict__.update(Script(vocabulary=served.script.vocabulary).__dict__)
    return served.script


@pytest.fixture
def openai_client(served: Talking) -> Iterator[openai.OpenAI]:
    """Official `openai` client of a module's `served` API."""
    import openai

    base_url = f"{served.address}/oai/api/v1"
    with openai.OpenAI(base_url=base_url, api_key=ALICE, max_retries=0) as opened:
        yield opened


@pytest.fixture
def anthropic_client(served: Talking) -> Iterator[anthropic.Anthropic]:
    """Official `anthropic` client of a module's `served` API."""
    import anthropic

    base_url = f"{served.address}/anthropic/api"
    with anthropic.Anthropic(base_url=base_url, api_key=ALICE, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3 model and its tokenizer."""
    from tests.support.tiny_models import build_tiny_qwen3

    return build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def base_model(tiny_model: Path) -> str:
    """The tiny model as an option of `cotrain serve`."""
    return f"tiny={tiny_model}"


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Engine:
    """One engine for the whole session, on one thread; workers start and stop around it."""
    import torch

    from cotrain_workers.engine.engine import Engine

    torch.set_num_threads(1)
    return Engine.load(str(tiny_model))


@pytest.fixture
def other(tiny_model: Path) -> Engine:
    """Engine of a second worker."""
    from cotrain_workers.engine.engine import Engine

    return Engine.load(str(tiny_model))


@pytest.fixture
def heartbeats_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send heartbeats often, because tests wait for them."""
    monkeypatch.setattr("cotrain_workers.worker.membership.HEARTBEAT_S", 0.05)


@pytest.fixture
async def server(empty_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Intake, futures and a scheduler; each test starts its own workers."""
    # A worker checks after each sleep whether it should stop.
    monkeypatch.setattr("cotrain_workers.worker.loop.IDLE_S", 0.02)
    async with stack(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture
def redis(empty_redis: EmbeddedRedis) -> Iterator[SyncConnection]:
    """Connection that bypasses the server."""
    connection = open_sync_connection(empty_redis.url)
    yield connection
    connection.close()
