from __future__ import annotations

import pytest

from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import WorkerId
from cotrain_store.monitoring.fleet import backlog_seconds


@pytest.mark.parametrize(
    ("tokens", "rates", "measured", "seconds"),
    [
        (0, [100.0], 50.0, 0.0),
        (1000, [100.0], 50.0, 10.0),
        (1000, [100.0, 300.0], 50.0, 2.5),
        (1000, [], 50.0, 20.0),
        (1000, [], 0.0, 0.0),
    ],
)
def test_what_waits_takes_as_long_as_all_workers_need(
    tokens: int, rates: list[float], measured: float, seconds: float
) -> None:
    assert backlog_seconds(tokens, rates, measured) == seconds


def test_sampling_is_computing_and_idling_is_not() -> None:
    duty = {"train": 0.25, "optim": 0.125, "sample": 0.5, "idle": 0.125}
    worker = WorkerHeartbeat(WorkerId("w0"), 1, "serving", "cpu", 1.0, 0, 0, 0.0, duty=duty)
    assert worker.busy == 0.875
