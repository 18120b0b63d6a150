"""Limit of wrong keys per address."""

from __future__ import annotations

import pytest

from cotrain_server.errors import TooManyFailures
from cotrain_server.limits.failures import FAILURES_PER_MINUTE, FailureCounter


def test_the_eleventh_failure_in_a_minute_is_refused() -> None:
    now = [0.0]
    failures = FailureCounter(lambda: now[0])
    for _ in range(FAILURES_PER_MINUTE):
        failures.note("192.0.2.1")
    with pytest.raises(TooManyFailures):
        failures.note("192.0.2.1")
    failures.note("192.0.2.2")
    now[0] = 61.0
    failures.note("192.0.2.1")
