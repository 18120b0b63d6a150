"""Fixtures every test may use."""

from __future__ import annotations

import functools
import gc
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

# Before torch is imported, here and in every process a test starts: two test processes with two threads
# each wait for one another on a machine of two cores, and take several times as long when it is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests of two threads: one that waits for the other spins no longer than a product here takes. Spinning for
# milliseconds, as it would, takes the core from the one it waits for: 164 s instead of 14 on two busy cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# What the interpreter and pytest compile is compiled once, not by each process of each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: The tests of the first file read what those of the second found out in minutes, or share a server, or a process that
#: servers are forked from, that takes seconds to start: one process runs both.
RUNS_WITH = {
    "tests/faults/test_host_clock.py": "tests/faults/test_directed.py",
    "tests/faults/test_objects.py": "tests/faults/test_directed.py",
    "tests/faults/test_random.py": "tests/faults/test_directed.py",
    "tests/unit/store/blobs/test_blobs.py": "tests/unit/store/blobs/test_objects.py",
    "tests/conformance/test_cotrain_extras.py": "tests/conformance/test_official_sdks.py",
    "tests/conformance/test_export_sdks.py": "tests/conformance/test_checkpoint_sdks.py",
    "tests/cookbook/test_reinforcement.py": "tests/cookbook/test_supervised.py",
}

#: Begun first: what takes one process minutes would keep the others waiting at the end. Of these some wait
#: most of their time and others compute all of it, so that both cores have work.
BEGINS_FIRST = (
    "tests/faults/test_directed.py",
    "tests/acceptance/test_examples.py",
    "tests/integration/test_loop_styles.py",
    "tests/unit/workers/engine/test_other_capability.py",
    "tests/integration/test_group_server.py",
    "tests/unit/workers/engine/test_cost.py",
    "tests/integration/test_distribution.py",
    "tests/integration/test_serve.py",
)

#: Of these the first wait for processes most of their time, and the second compute all of it: one kind after the other
#: leaves the cores idle first, and has the processes share two of them then.
MIXED = (("tests/faults/", "tests/integration/"), ("tests/unit/",))

#: What Redis and the spool sync waits for no disk here; that a power cut loses nothing is proven by shims
#: (tests/faults/power_*), not by a disk.
MEMORY_DISK = Path("/dev/shm")
ENOUGH_BYTES = 8 << 30
if "TMPDIR" not in os.environ and (
    MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free >= ENOUGH_BYTES
):
    os.environ["TMPDIR"] = str(MEMORY_DISK)

# No timed assertions. Every run draws the same examples, so that a change is judged by what it changed;
# `--hypothesis-profile=explore` draws new ones, and prints the blob that repeats a failure.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=35)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")


# redis-py looks up on disk which version it is for every connection, of which a test opens some ten.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types here
    """Has the tests of a file run in one process, in order, where `-n` makes several."""

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
    """Have the processes of `-n` forked from one that has imported the tests."""
    from tests.warm.collected import fork_processes_of  # it keeps the environment as set above

    fork_processes_of(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither while all tests are imported nor, later, among what was imported.

    A search of all of it takes half a second, and `caplog` asks for one per test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the tests of the longest files begin first, and those that compute come among those that wait."""
    places = {file: place for place, file in enumerate(BEGINS_FIRST)}
    turns = turns_of(dict.fromkeys(file_of(item) for item in items))
    items.sort(key=lambda item: (places.get(file_of(item), len(places)), turns[file_of(item)]))


def file_of(item: pytest.Item) -> str:
    """Name the file of a test."""
    return item.nodeid.partition("::")[0]


def turns_of(files: Iterable[str]) -> dict[str, float]:
    """Deal files out: after any part of one of MIXED has been run, the same part of the others has; other files go first.

    Those keep together: files of `tests/conformance` share a server as long as none of another folder is between them.
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
    """One real Redis for the whole session; use `empty_redis` for a clean one."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def object_store() -> Iterator[SeaweedFS]:
    """One real S3 server for the whole session; every test takes a prefix of its own."""
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
    """All settings of the session's Redis, as it came up."""
    return redis_server.settings()


@pytest.fixture(autouse=True)
def settings_are_left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves other settings in the session's Redis, instead of a later one."""
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
    """What is logged from here on; what an earlier test left behind says so before."""
    gc.collect()
    caplog.clear()
    return caplog
