"""`make demo`, and its worker killed in the middle: minutes, so `pytest -m soak tests/faults`."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm.sources import ROOT

#: Steps of all tenants together, of 128: they are not equally fast.
KILLED_AT_STEPS = (20, 50, 80)


def descendants(pid: int) -> Iterator[int]:
    """Find the processes that descend from this one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def kill_worker() -> None:
    (worker,) = [
        pid for pid in descendants(os.getpid()) if b"cotrain_workers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(worker, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killing_the_worker_in_the_middle_of_the_demo_changes_nothing_in_its_final_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo: Any = importlib.import_module("demo")
    model, corpus = demo.make_model()

    def trained() -> Any:
        with demo.serving(model, demo.KEYS, say=demo.say) as address:
            return demo.train_everybody(address, model, corpus)

    calm = trained()

    watch, killed = demo.watch, []

    def watch_and_kill(progress: Any, work: Any) -> None:
        for step in KILLED_AT_STEPS:
            while sum(its.step for its in progress) < step:
                assert not all(each.done() for each in work)
                time.sleep(0.1)
            kill_worker()
            killed.append(step)
        watch(progress, work)

    monkeypatch.setattr(demo, "watch", watch_and_kill)
    disturbed = trained()
    assert killed == list(KILLED_AT_STEPS)
    assert [its.before for its in disturbed] == [its.before for its in calm]
    assert [its.after for its in disturbed] == [its.after for its in calm]
    assert [its.loss for its in disturbed] == [its.loss for its in calm]
