"""Fixtures for every test."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis.utils
from hypothesis import settings

# Hooks of pytest, which it finds by their names here.
from tests.support.file_order import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401
from tests.support.object_store import SeaweedFS
from tests.support.redis_server import EmbeddedRedis

# Set before torch is imported, here and in every process a test starts. On a machine of two cores,
# two test processes with two threads each wait for one another, and a busy machine makes them
# several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For tests of two threads: limit the spinning of a waiting thread to the duration of one product
# here. The default spins for milliseconds and takes the core from the other thread: 164 s instead
# of 14 on two busy cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Bytecode of the interpreter and of pytest is compiled once, not by each process of each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: In memory, so that syncs of Redis and of the spool wait for no disk. Shims prove that a power cut
#: loses nothing (tests/faults/power_*); a disk could not.
MEMORY_DISK = Path("/dev/shm")
ENOUGH_BYTES = 8 << 30
if "TMPDIR" not in os.environ and (MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free >= ENOUGH_BYTES):
    os.environ["TMPDIR"] = str(MEMORY_DISK)

# No timed assertions. Every run draws the same examples, so that its result depends only on the
# change under test; `--hypothesis-profile=explore` draws new ones, and prints the blob that repeats
# a failure.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=35)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")


# redis-py reads its own version from disk for every connection, of which a test opens about ten.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the processes of `-n` from one that has imported the tests."""
    from tests.warm.collected import fork_processes_of  # it keeps the environment as set above

    fork_processes_of(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while all tests are imported, and exclude the imported objects
    from it afterwards.

    A full collection takes half a second, and `caplog` runs one per test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        let_loggers_propagate()
        gc.enable()
        gc.collect()
        gc.freeze()


def let_loggers_propagate() -> None:
    """Make the loggers of libraries propagate, of which torch has fifty.

    Pytest attaches its handlers to every logger that does not, six times per test. That takes as long as a short test.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One real Redis for the whole session; `empty_redis` is a clean one."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def object_store() -> Iterator[SeaweedFS]:
    """One real S3 server for the whole session; every test uses its own prefix."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def empty_redis(redis_server: EmbeddedRedis) -> EmbeddedRedis:
    """The session's Redis, emptied."""
    redis_server.flush()
    return redis_server


@pytest.fixture(scope="session")
def redis_settings(redis_server: EmbeddedRedis) -> dict[str, str]:
    """Settings of the session's Redis at its start."""
    return redis_server.settings()


@pytest.fixture(autouse=True)
def settings_are_left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves changed settings in the session's Redis, because a later test would
    fail otherwise."""
    if "redis_server" not in request.fixturenames:
        yield
        return
    server: EmbeddedRedis = request.getfixturevalue("redis_server")
    settings: dict[str, str] = request.getfixturevalue("redis_settings")
    yield
    if left := server.put_back(settings):
        pytest.fail(f"This test left other settings in the Redis that all tests share: {left}")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Log records of this test only, without errors of earlier tests."""
    gc.collect()
    caplog.clear()
    return caplog
