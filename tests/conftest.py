"""Fixtures every test may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.redis_server import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One real Redis for the whole session; use `empty_redis` for a clean one."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def empty_redis(redis_server: EmbeddedRedis) -> EmbeddedRedis:
    """The session's Redis, emptied."""
    redis_server.flush()
    return redis_server
