"""Fixtures for every test."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.utils
from hypothesis import settings
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

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

#: Pairs of files that run in one process, because the first file needs something of the second. That
#: is its results, which took minutes, its server, or its process that forks servers.
RUNS_WITH = {
    "tests/faults/test_host_clock.py": "tests/faults/test_directed.py",
    "tests/faults/test_objects.py": "tests/faults/test_directed.py",
    "tests/faults/test_random.py": "tests/faults/test_directed.py",
    "tests/unit/store/blobs/test_blobs.py": "tests/unit/store/blobs/test_objects.py",
    "tests/conformance/test_cotrain_extras.py": "tests/conformance/test_official_sdks.py",
    "tests/cookbook/test_reinforcement.py": "tests/cookbook/test_supervised.py",
}

#: Files that start first: each takes one process minutes, and the others would wait for it at the
#: end. Some of them mostly wait and others compute all the time, so that both cores have work.
BEGINS_FIRST = (
    "tests/faults/test_directed.py",
    "tests/acceptance/test_examples.py",
    "tests/unit/workers/engine/test_other_capability.py",
    "tests/integration/test_groups.py",
    "tests/unit/workers/engine/test_cost.py",
    "tests/integration/test_distribution.py",
    "tests/integration/test_serve.py",
    "tests/unit/workers/engine/test_families.py",
    "tests/unit/workers/engine/test_on_rehearsed_cuda.py",
)

#: Two kinds of files that run alternately: the first mostly waits for processes, and the second
#: computes all the time. One kind after the other would first leave the cores idle, then share them.
MIXED = (("tests/faults/", "tests/integration/"), ("tests/unit/",))

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


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types here
    """Scheduler for `-n` that runs the tests of a file in one process and in order."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return RUNS_WITH.get(file, file)


# xdist has a mark for this (`--dist loadgroup`), which its 3.8.0 loses under pytest 9.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the tests of the longest files first, and mix computing tests with waiting ones."""
    places = {file: place for place, file in enumerate(BEGINS_FIRST)}
    turns = turns_of(dict.fromkeys(file_of(item) for item in items))
    items.sort(key=lambda item: (places.get(file_of(item), len(places)), turns[file_of(item)]))


def file_of(item: pytest.Item) -> str:
    """Return the file of a test."""
    return item.nodeid.partition("::")[0]


def turns_of(files: Iterable[str]) -> dict[str, float]:
    """Return the position of each file: the kinds of MIXED progress at the same rate, and other
    files go first.

    The other files stay together: files of `tests/conformance` share a server until a file of
    another folder runs.
    """
    of_kind: dict[int | None, list[str]] = {}
    for file in files:
        kind = next((at for at, one in enumerate(MIXED) if file.startswith(one)), None)
        of_kind.setdefault(kind, []).append(file)
    return {
        file: -1.0 if kind is None else at / len(mates)
        for kind, mates in of_kind.items()
        for at, file in enumerate(mates)
    }


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One real Redis for the whole session; `empty_redis` is a clean one."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def object_store() -> Iterator[SeaweedFS]:
    """One real S3 server for the whole session; every test uses its own prefix."""
    from tests.support.object_store import SeaweedFS

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
