"""Supervised programs, killed and restarted from their checkpoints."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

import pytest

from tests.cookbook.programs import Bench, Ran, Rows, run_of
from tests.cookbook.workshop import BASE_MODEL, CHATS

STEPS = 32
SMALL = {
    "model_name": BASE_MODEL,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "lora_rank": 8,
    "max_length": 256,
    "save_every": 10,
}
KILLED = -9


class Twice(NamedTuple):
    """A program that was killed, and its second run."""

    killed: Ran
    resumed: Ran


@pytest.fixture(scope="module")
def sl_loop(bench: Bench) -> Twice:
    """Kill sl_loop between two checkpoints and start it again."""
    killed = bench.run_and_kill("sl_loop", "sl_loop", at=r"\bStep 12\b", **SMALL)
    return Twice(killed, bench.run("sl_loop", "sl_loop", **SMALL))


@pytest.fixture(scope="module")
def chat_sl(bench: Bench) -> Twice:
    """Kill and restart chat_sl, which also keeps a rolling checkpoint."""
    options = {**SMALL, "dataset": CHATS, "rolling_save_every": 3}
    killed = bench.run_and_kill("chat_sl.train", "chat_sl", at=r"\bStep 23\b", **options)
    again = {**options, "behavior_if_log_dir_exists": "resume"}
    return Twice(killed, bench.run("chat_sl.train", "chat_sl", **again))


def test_sl_loop_resumes_with_the_numbers_at_which_it_was_killed(sl_loop: Twice) -> None:
    killed, resumed = sl_loop
    assert (killed.status, resumed.status) == (KILLED, 0), resumed.output
    (saved,) = killed.checkpoints
    before = {row["step"]: row for row in killed.steps}
    after = {row["step"]: row for row in resumed.steps[len(killed.steps) :]}
    assert list(after) == list(range(saved["batch"], STEPS))
    both = sorted(before.keys() & after.keys())
    assert 12 in both
    for name in ("train_mean_nll", "grad_norm", "learning_rate"):
        assert [before[step][name] for step in both] == [after[step][name] for step in both]


def test_sl_loop_learns(sl_loop: Twice) -> None:
    losses = sl_loop.resumed.series("train_mean_nll")
    assert losses[-1] < losses[0] / 4


def test_the_server_lists_the_checkpoints_of_sl_loop(sl_loop: Twice, bench: Bench) -> None:
    saved = sl_loop.resumed.checkpoints
    first, *others = [row["name"] for row in saved]  # it saves again where it resumed
    assert (first, others) == ("000010", ["000010", "000020", "000030", "final"])
    assert lifetimes(bench, saved) == expected(saved)


@pytest.mark.cookbook
def test_chat_sl_resumes_from_its_last_checkpoint(chat_sl: Twice) -> None:
    killed, resumed = chat_sl
    assert (killed.status, resumed.status) == (KILLED, 0), resumed.output
    last = killed.checkpoints[-1]
    assert f"Resumed training from {last['state_path']}" in resumed.output
    assert f"Renderer metadata matches for checkpoint {last['state_path']}" in resumed.output
    assert [row["step"] for row in resumed.steps] == list(range(STEPS))
    losses = resumed.series("train_mean_nll")
    assert losses[-1] < losses[0] / 4


@pytest.mark.cookbook
def test_the_server_keeps_the_rolling_checkpoint_left_by_a_kill(chat_sl: Twice, bench: Bench) -> None:
    killed, resumed = chat_sl
    rolled = [row["state_path"] for row in resumed.checkpoints if row.get("rolling")]
    kept = [row for row in resumed.checkpoints if not row.get("rolling")]
    assert len(rolled) == 10
    assert [row["name"] for row in kept] == ["000010", "000020", "000030", "final"]
    last = killed.checkpoints[-1]["state_path"]
    assert lifetimes(bench, kept) == {last: timedelta(hours=2), **expected(kept)}


def expected(saved: Rows) -> dict[str, timedelta | None]:
    """Return the lifetimes that a program requests: a week, but the last checkpoints have none."""
    return {
        row[kind]: None if row["name"] == "final" else timedelta(days=7)
        for row in saved
        for kind in ("state_path", "sampler_path")
        if kind in row
    }


def lifetimes(bench: Bench, saved: Rows) -> dict[str, timedelta | None]:
    """Return the lifetimes of these checkpoints on the server."""
    kept: dict[str, timedelta | None] = {}
    for run in {run_of(row["state_path"]) for row in saved}:
        for path, checkpoint in bench.checkpoints(run).items():
            assert checkpoint["size_bytes"] > 0
            made, ends = (checkpoint[time] for time in ("time", "expires_at"))
            kept[path] = None if ends is None else between(made, ends)
    return kept


def between(made: str, ends: str) -> timedelta:
    """Return the time between two moments, rounded to the minute."""
    lasts = datetime.fromisoformat(ends) - datetime.fromisoformat(made)
    return timedelta(minutes=round(lasts / timedelta(minutes=1)))
