"""Share of the product's lines that the unit tests run: `pytest -p tests.support.covered_lines` fails if it falls.

Only lines of functions count. Those of modules run at the import, which is not recorded: the processes of `-n` share it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from coverage import Coverage

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / folder for folder in ("client", "scheduler", "server", "workers")]
UNIT_TESTS = ROOT / "tests" / "unit"
#: Least share in percent, a little below that of a whole run. Raise it when that has risen.
LEAST = 58.0


class CoveredLines:
    """Plugin of each test process, and of the process that starts them."""

    def __init__(self) -> None:
        self._coverage = Coverage(
            data_file=None, config_file=False, source=list(map(str, SOURCES)), messages=False
        )  # fmt: skip
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._lines: defaultdict[str, set[int]] = defaultdict(set)
        self._report = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record the lines of a unit test."""
        if not item.path.is_relative_to(UNIT_TESTS):
            return (yield)
        with self._coverage.collect():
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the lines of another process, unless it crashed."""
        for file, lines in getattr(node, "workeroutput", {}).get("lines", {}).items():
            self._lines[file].update(lines)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the lines, or compare their share if no tests were chosen."""
        data = self._coverage.get_data()
        for file in data.measured_files():
            self._lines[file].update(data.lines(file) or ())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["lines"] = {file: sorted(lines) for file, lines in self._lines.items()}
        elif is_whole(session.config):
            share = share_of(self._lines)
            self._report = f"The unit tests run {share:.2f} % of the lines of functions. The least is {LEAST} %."
            if share < LEAST and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                self._report += " Add tests: `make coverage` lists the other lines."

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the share."""
        if self._report:
            terminalreporter.write_line(self._report)


def is_whole(config: pytest.Config) -> bool:
    """Return True for a run of all tests, without a choice of files, names or marks."""
    option = config.option
    is_choice = option.keyword or option.collectonly or option.markexpr not in config.getini("addopts")
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not is_choice


def share_of(recorded: Mapping[str, set[int]]) -> float:
    """Return the percentage of the lines of functions that were recorded."""
    run, every = 0, 0
    for path in (path for folder in SOURCES for path in folder.rglob("*.py")):
        if path.name.endswith("_pb2.py"):
            continue
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        assert code is not None, path
        lines = set(lines_of_functions(code))
        every += len(lines)
        run += len(lines & recorded.get(str(path), set()))
    return 100 * run / every


def lines_of_functions(code: CodeType) -> Iterator[int]:
    """Yield the lines inside functions, without those of their `def`."""
    if code.co_flags & inspect.CO_OPTIMIZED:
        yield from (line for _, _, line in code.co_lines() if line and line != code.co_firstlineno)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from lines_of_functions(each)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CoveredLines())
