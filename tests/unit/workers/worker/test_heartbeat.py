"""A worker's sign of life: what ends it, and what it outlives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from cotrain_store.errors import Fenced
from cotrain_workers.worker import heartbeat as heart_module
from cotrain_workers.worker.heartbeat import Heart

if TYPE_CHECKING:
    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.oplog.execution import Execution

ENOUGH_S = 60.0


class Failing:
    """A store that fails each beat in its own way, and then takes one."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.is_told = threading.Event()

    def heartbeat(self, _: Any) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.is_told.set()


def heart_of(store: Failing) -> tuple[Heart, threading.Event]:
    stopping = threading.Event()
    beat = cast("WorkerHeartbeat", object())
    return Heart(cast("Execution", store), lambda: beat, stopping), stopping


def test_a_heart_beats_on_after_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart_module, "BEAT_S", 0.001)
    store = Failing(RedisConnectionError(), OutOfMemoryError(), OSError("no free descriptor"))
    heart, stopping = heart_of(store)
    heart.start()
    assert store.is_told.wait(ENOUGH_S)
    assert not stopping.is_set()
    stopping.set()
    heart.join()
    assert not heart.was_replaced


def test_a_worker_that_was_replaced_stops() -> None:
    heart, stopping = heart_of(Failing(Fenced()))
    heart.start()
    heart.join()
    assert stopping.is_set()
    assert heart.was_replaced


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_without_a_heart_stops() -> None:
    heart, stopping = heart_of(Failing(RuntimeError("nobody foresaw this")))
    heart.start()
    heart.join()
    assert stopping.is_set()
    assert not heart.was_replaced
