"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.redis_server import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Before torch is imported, here and in every process a test starts: two test processes with two threads
# each wait for one another on a machine of two cores, and take several times as long when it is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Below these folders all tests share servers, or what a first one found out.
SHARING = (Path(__file__).parent / "conformance", Path(__file__).parent / "faults")


# No timed assertions. Every run draws the same examples, so that a change is judged by what it changed;
# `--hypothesis-profile=explore` draws new ones, and prints the blob that repeats a failure.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Have what shares an expensive fixture run in one process, where `-n` makes several."""
    for item in items:
        shared = next((folder for folder in SHARING if folder in item.path.parents), item.path)
        item.add_marker(pytest.mark.xdist_group(str(shared)))


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
