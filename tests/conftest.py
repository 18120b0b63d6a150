"""Fixtures every test may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.redis_server import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Iterator


# No timed assertions; a failure prints the blob that repeats it.
settings.register_profile("cotrain", deadline=None, print_blob=True)
settings.load_profile("cotrain")


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
