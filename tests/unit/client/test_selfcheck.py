"""Command `cotrain selfcheck`: its exit status and its table for each outcome of the workers."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cotrain.cli import command_line
from cotrain.commands import workers

PASSED = {
    "asked_at": 5.0, "at": 6.0, "took_s": 0.25, "ok": True, "problem": "", "runs": 6, "tokens": 318,
    "tolerance": 0.0, "logprobs": 0.0, "gradients": 0.0, "weights": 0.0,
    "samples": None,
}  # fmt: skip
LEAK = {**PASSED, "ok": False, "logprobs": 0.5, "problem": "The logprobs of self-check:1 differ."}


def worker(name: str, result: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "pool": "p", "base_model": "m", "id": name, "state": "serving", "drain_asked_at": None,
        "drain_waits": False, "heartbeat": {"self_check": result}, "open_steps": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("results", "status", "words"),
    [
        ({"w0": PASSED, "w1": PASSED}, 0, "passed"),
        ({"w0": PASSED, "w1": LEAK}, 1, "w1: The logprobs of self-check:1 differ."),
        ({"w0": PASSED, "w1": {**PASSED, "asked_at": 4.0}}, 2, "no result in time"),
        ({"w0": LEAK, "w1": None}, 1, "FAILED"),
        ({}, 2, "worker"),
    ],
)
def test_the_exit_status_is_that_of_the_worst_worker(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, Any], status: int, words: str
) -> None:
    def answer(_: object, method: str, *__: str) -> dict[str, Any]:
        workers = [worker(name, result) for name, result in results.items()]
        return {"workers": workers} if method == "GET" else {"asked_at": 5.0}

    monkeypatch.setattr(workers, "ask_admin", answer)
    monkeypatch.setattr(workers, "POLL_S", 0.0)
    times = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(times)))
    found: Result = CliRunner().invoke(command_line([]), ["selfcheck", "--timeout", "3"])
    assert (found.exit_code, words in found.output) == (status, True), found.output
