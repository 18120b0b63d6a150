"""Fixtures of all trials: one nursery, and the undisturbed ending of each set of programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from tests.faults.invariants import Ending
from tests.faults.orders import Nursery, Tally
from tests.faults.traffic import Program
from tests.faults.trial import trial

Calm = Callable[[Sequence[Program]], Awaitable[Ending]]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal base model without a tokenizer."""
    from tests.support.tiny_models import build_tiny

    return build_tiny("qwen3", tmp_path_factory.mktemp("small") / "model")


#: Tallies of every nursery.
TALLIES = pytest.StashKey[list[Tally]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of killed processes and of violations."""
    tallies = config.stash.setdefault(TALLIES, [])
    tally = sum(tallies, Tally())
    if tally.trials:
        terminalreporter.write_line(f"faults: {tally}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nursery(small_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Nursery]:
    """Parent of all processes."""
    async with Nursery(small_model) as opened:
        request.config.stash.setdefault(TALLIES, []).append(opened.tally)
        yield opened


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new data folder; its path is short enough for a unix socket."""
    with TemporaryDirectory(prefix="cotrain-") as name:
        yield Path(name)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def calm(nursery: Nursery) -> AsyncIterator[Calm]:
    """Undisturbed endings of programs."""
    known: list[tuple[Sequence[Program], Ending]] = []

    async def ending(programs: Sequence[Program]) -> Ending:
        for one, its in known:
            if one == programs:
                return its
        with TemporaryDirectory(prefix="cotrain-") as name:
            outcome = await trial(nursery, Path(name), programs)
        assert outcome.violations == []
        assert outcome.ending
        known.append((programs, outcome.ending))
        return outcome.ending

    yield ending
