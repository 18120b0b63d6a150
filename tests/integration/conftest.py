"""Fixtures of the tests that run on a real Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.log import Log, open_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cotrain_workers.engine import Engine
    from tests.support.redis_server import EmbeddedRedis


@pytest.fixture
async def log(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Log]:
    """The log of one pool, driven by hand."""
    async with open_log(empty_redis.url, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3 model and its tokenizer."""
    from tests.support.tiny_models import build_tiny_qwen3

    return build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Engine:
    """One engine for the whole session, on one thread: workers come and go around it."""
    import torch

    from cotrain_workers.engine import Engine

    torch.set_num_threads(1)
    return Engine.load(str(tiny_model))
