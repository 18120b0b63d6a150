"""Yield points of a computation: the callback, its duration, and its errors."""

from __future__ import annotations

import pytest

from cotrain_workers.engine.coordination import Yielding, drive, run_to_end, timed


def computation(caught: list[BaseException]) -> Yielding[str]:
    """Yield twice. An error raised at a yield point is recorded and ends the computation early."""
    try:
        yield
        yield
    except RuntimeError as error:
        caught.append(error)
        return "failed"
    return "done"


def test_the_callback_runs_at_every_yield_point() -> None:
    yields: list[int] = []
    result, elsewhere_s = drive(computation([]), lambda: yields.append(1))
    assert (result, len(yields)) == ("done", 2)
    assert elsewhere_s > 0


def test_a_computation_without_a_callback_runs_to_its_end() -> None:
    assert run_to_end(computation([])) == "done"


def test_an_error_at_a_yield_point_is_raised_in_the_computation() -> None:
    caught: list[BaseException] = []
    kept: list[object] = []

    def fail() -> None:
        large = object()
        kept.append(large)
        raise RuntimeError("decoder")

    assert drive(computation(caught), fail)[0] == "failed"
    assert [str(error) for error in caught] == ["decoder"]
    frame = caught[0].__traceback__
    while frame is not None:
        assert "large" not in frame.tb_frame.f_locals  # the locals of the frames are freed
        frame = frame.tb_next


def test_an_error_that_the_computation_does_not_handle_ends_it() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        drive(computation([]), fail)


def test_timed_work_has_the_same_yield_points_and_excludes_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cotrain_workers.engine.coordination.time.perf_counter", lambda: now)

    def work() -> Yielding[str]:
        nonlocal now
        now += 1.0
        yield
        now += 2.0
        return "done"

    def elsewhere() -> None:
        nonlocal now
        now += 100.0

    assert drive(timed(work()), elsewhere) == (("done", 3.0), 100.0)
