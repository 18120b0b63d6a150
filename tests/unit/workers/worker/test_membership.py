"""Membership of a worker: errors that end its heartbeat, and the exclusive id."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from cotrain_store.errors import Fenced
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import WorkerId
from cotrain_store.oplog.execution import Execution
from cotrain_workers.worker import membership
from cotrain_workers.worker.membership import (
    Heartbeat,
    WorkerIdInUse,
    await_absence,
    claim_free_worker_id,
    lock_worker_id,
)
from tests.warm.popen import Popen

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
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.001)
    store = Failing(RedisConnectionError(), OutOfMemoryError(), OSError("no free descriptor"))
    heartbeat, stopping = heartbeat_of(store)
    heartbeat.start()
    assert store.is_received.wait(ENOUGH_S)
    assert not stopping.is_set()
    heartbeat.end()
    assert not heartbeat.was_replaced


def test_heartbeats_continue_while_the_worker_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_S", 0.001)
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


def heartbeat_from(host: str, seen_at: float = 0.0) -> WorkerHeartbeat:
    return WorkerHeartbeat(WorkerId("w0"), 1, "serving", "cpu", 1.0, 0, 0, seen_at, host=host)


def test_a_worker_id_belongs_to_one_process_until_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from cotrain_workers.worker.membership import lock_worker_id;"
        "lock_worker_id(pathlib.Path(sys.argv[1]), 'pool', 'w0'); print('taken', flush=True); sys.stdin.read()"
    )
    with Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"taken\n"
        with pytest.raises(WorkerIdInUse, match=r"Another process is worker w0.*COTRAIN_WORKER_ID"):
            lock_worker_id(tmp_path, "pool", "w0", patience_s=0)
        for others in ("w1", "pool"), ("w0", "other"):
            os.close(lock_worker_id(tmp_path, others[1], others[0], patience_s=0))
        holder.kill()
    os.close(lock_worker_id(tmp_path, "pool", "w0"))


def test_the_lock_of_an_ending_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_worker_id(tmp_path, "pool", "w0")
    monkeypatch.setattr("cotrain_workers.worker.membership.time.sleep", lambda _: os.close(lock))
    os.close(lock_worker_id(tmp_path, "pool", "w0"))


@pytest.mark.parametrize("heartbeat", [None, heartbeat_from("here"), heartbeat_from("")])
def test_without_a_heartbeat_from_another_host_there_is_no_wait(heartbeat: WorkerHeartbeat | None) -> None:
    """A heartbeat of this host is of an ended process, because the lock is free."""
    await_absence(lambda: heartbeat, "here", patience_s=0)


def test_an_id_with_heartbeats_from_another_host_is_refused() -> None:
    with pytest.raises(WorkerIdInUse, match="on host there, is worker w0"):
        await_absence(lambda: heartbeat_from("there"), "here", patience_s=0)


def test_a_last_heartbeat_from_another_host_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_workers.worker.membership.time.sleep", lambda _: None)
    heartbeats = iter([heartbeat_from("there"), heartbeat_from("there"), None])
    await_absence(lambda: next(heartbeats), "here")


def test_each_worker_without_an_id_takes_the_first_free_one(tmp_path: Path) -> None:
    claimed = [claim_free_worker_id(tmp_path, "pool", lambda _: None, "here") for _ in range(3)]
    assert claimed == ["w0", "w1", "w2"]
    assert claim_free_worker_id(tmp_path, "other", lambda _: None, "here") == "w0"


def test_the_successor_of_a_worker_takes_its_id(tmp_path: Path) -> None:
    claim_free_worker_id(tmp_path, "pool", lambda _: None, "here")
    gone = lock_worker_id(tmp_path, "pool", "w1")
    claim_free_worker_id(tmp_path, "pool", lambda _: None, "here")
    os.close(gone)
    assert claim_free_worker_id(tmp_path, "pool", lambda _: None, "here") == "w1"


def test_an_id_with_a_live_process_on_another_host_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_workers.worker.membership.time.sleep", lambda _: None)
    beats = iter(range(100))

    def of(worker: WorkerId) -> WorkerHeartbeat | None:
        return heartbeat_from("there", next(beats)) if worker == "w0" else None

    assert claim_free_worker_id(tmp_path, "pool", of, "here") == "w1"
    os.close(lock_worker_id(tmp_path, "pool", "w0", patience_s=0))


def test_an_id_of_another_host_is_free_once_its_heartbeat_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, after a container was killed and recreated."""
    monkeypatch.setattr("cotrain_workers.worker.membership.time.sleep", lambda _: None)
    last = iter([heartbeat_from("there")] * 3)
    assert claim_free_worker_id(tmp_path, "pool", lambda _: next(last, None), "here") == "w0"
