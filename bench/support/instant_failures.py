"""Plugin of pytest that prints a failure at once, because a run that is stopped prints no summary."""

from __future__ import annotations

import pytest


class InstantFailures:
    """Reporter of failed tests, in the process that prints."""

    @staticmethod
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # processes of xdist send their results to this one
        config.pluginmanager.register(InstantFailures(), "instant_failures")
