"""Order of the test files, and their distribution over the processes of `-n`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

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
