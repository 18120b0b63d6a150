"""Heartbeat of a worker: the errors that end it, and those that do not."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.oplog.execution import Execution
from cotrain_workers.worker import heartbeat as heartbeat_module
from cotrain_workers.worker.heartbeat import Heartbeat

ENOUGH_S = 60.0


class Failing:
    """Store that raises the given errors, one per heartbeat, and then accepts one."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.is_received = threading.Event()

    def heartbeat(self, _: Any) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.is_received.set()


def heartbeat_of(store: Failing) -> tuple[Heartbeat, threading.Event]:
    stopping = threading.Event()
    facts = cast("WorkerHeartbeat", object())
    return Heartbeat(cast("Execution", store), lambda: facts, stopping), stopping


def test_heartbeats_continue_after_transient_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.001)
    store = Failing(RedisConnectionError(), OutOfMemoryError(), OSError("no free descriptor"))
    heartbeat, stopping = heartbeat_of(store)
    heartbeat.start()
    assert store.is_received.wait(ENOUGH_S)
    assert not stopping.is_set()
    heartbeat.end()
    assert not heartbeat.was_replaced


def test_heartbeats_continue_while_the_worker_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.001)
    store = Failing()
    heartbeat, stopping = heartbeat_of(store)
    stopping.set()
    heartbeat.start()
    for _ in range(2):
        assert store.is_received.wait(ENOUGH_S)
        store.is_received.clear()
    heartbeat.end()


def test_a_replaced_worker_stops() -> None:
    heartbeat, stopping = heartbeat_of(Failing(Fenced()))
    heartbeat.start()
    heartbeat._thread.join()
    assert stopping.is_set()
    assert heartbeat.was_replaced


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_without_a_heartbeat_stops() -> None:
    heartbeat, stopping = heartbeat_of(Failing(RuntimeError("unforeseen")))
    heartbeat.start()
    heartbeat._thread.join()
    assert stopping.is_set()
    assert not heartbeat.was_replaced
