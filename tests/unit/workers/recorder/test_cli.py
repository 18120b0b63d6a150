"""`cotrain replay` and `cotrain recorder` on real files, without a server."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cotrain.cli import COMMANDS, command_line
from cotrain_store.messages.ids import RunId
from cotrain_workers.recorder.file import read_cycle, write_cycle
from tests.support.flight import A, B, Flight, a_pass, a_step, create
from tests.support.training import NewEngine
from tests.warm.popen import run

APP = command_line(
    EntryPoint(name, f"cotrain_workers.recorder.cli:{name}", COMMANDS) for name in ("recorder", "replay")
)


RECORDED = Path(__file__).parents[3] / "data" / "recorded"
WITHOUT_REDIS = """
import sys
from tests.warm.anew import forget
forget("cotrain", "redis")
sys.modules["redis"] = None
import typer
from cotrain_workers.recorder.cli import replay
typer.run(replay)
"""


def cotrain(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.fixture
def flight(new_engine: NewEngine, tmp_path: Path) -> Flight:
    """Record two cycles of two runs in a server's folder."""
    flight = Flight(new_engine(), tmp_path / "recorder" / "pool" / "w0")
    flight.cycle(create(A, rank=4), create(B, rank=2), a_pass(B, 1))
    flight.cycle(a_pass(A, 1), a_step(A, 2), a_pass(B, 2))
    return flight


def test_an_equal_replay_reports_it_and_exits_with_0(flight: Flight) -> None:
    result = cotrain("replay", flight.files[1])
    assert result.exit_code == 0, result.output
    assert "Cycle 2 of tiny on w0" in result.output
    assert "2 runs, 3 ops" in result.output
    assert result.stdout.count("equal") == 5
    assert result.stdout.endswith("Nothing diverged.\n")


def test_a_replay_that_diverges_names_run_and_seq_and_exits_with_1(flight: Flight, tmp_path: Path) -> None:
    cycle = read_cycle(flight.files[1])
    damaged = tmp_path / "damaged.zip"
    write_cycle(damaged, replace(cycle, bodies=[*cycle.bodies[:2], a_pass(B, 9)[3]]))
    result = cotrain("replay", damaged)
    assert result.exit_code == 1
    (row,) = [line for line in result.stdout.splitlines() if "log-probs" in line]
    assert row.split()[:3] == [B, "2", "forward_backward"]
    assert result.stdout.endswith("2 of 5 diverged.\n")  # the result, and the gradient that it left


def test_a_replay_as_json_has_the_same_verdicts_and_exit_code(flight: Flight, tmp_path: Path) -> None:
    done = cotrain("replay", flight.files[1], "--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["diverged"], shown["other_numerics"]) == (0, 0, [])
    assert (shown["worker"], shown["cycle"], shown["runs"], shown["ops"]) == ("w0", 2, [A, B], 3)
    assert [row["verdict"] for row in shown["compared"]] == ["equal"] * 5
    cycle = read_cycle(flight.files[1])
    damaged = tmp_path / "damaged.zip"
    write_cycle(damaged, replace(cycle, bodies=[*cycle.bodies[:2], a_pass(B, 9)[3]]))
    diverged = cotrain("replay", damaged, "--json")
    assert (diverged.exit_code, json.loads(diverged.stdout)["diverged"]) == (1, 2)


def test_a_recording_of_another_machine_is_compared_with_a_tolerance(flight: Flight, tmp_path: Path) -> None:
    cycle = read_cycle(flight.files[1])
    theirs = replace(cycle.facts.numerics, hardware="AVX9", torch="1.0")
    elsewhere = tmp_path / "elsewhere.zip"
    write_cycle(elsewhere, replace(cycle, facts=replace(cycle.facts, numerics=theirs)))
    result = cotrain("replay", elsewhere)
    assert result.exit_code == 0, result.output
    assert "Other numerics (hardware AVX9, now " in result.output
    assert "compared with a tolerance" in result.output


def test_a_cycle_without_an_outcome_reports_the_crash_of_its_process(flight: Flight) -> None:
    flight.begin(a_pass(A, 3))
    result = cotrain("replay", flight.files[2])
    assert result.exit_code == 0, result.output
    assert "its process died in this cycle" in result.output
    assert result.stdout.endswith("Nothing to compare with.\n")


def test_an_impossible_replay_is_reported_in_one_line(flight: Flight, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.zip"
    nothing.write_bytes(b"PK")
    for arguments in ([nothing], [flight.files[1], "--base-model", str(tmp_path)]):
        result = cotrain("replay", *arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output
        assert result.output.strip()


def test_recordings_are_listed_with_the_newest_first(flight: Flight, tmp_path: Path) -> None:
    (flight.folder / "000000000009-1.zip").write_bytes(b"PK")
    result = cotrain("recorder", "list", "--data-dir", tmp_path)
    assert result.exit_code == 0, result.output
    _, *rows = result.stdout.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [str(path) for path in flight.files[1::-1]]
    assert rows[0].split()[1] == "damaged"
    assert rows[1].split()[3:7] == ["w0", "2", "2", "3"]
    damaged, newest, _ = json.loads(cotrain("recorder", "list", "--data-dir", tmp_path, "--json").stdout)
    assert (damaged["size_bytes"], damaged["cycle"], damaged["runs"]) == (2, None, None)
    assert (newest["file"], newest["base_model"]) == (str(flight.files[1]), "tiny")
    assert datetime.fromisoformat(newest["recorded_at"]).tzinfo is not None


def test_one_run_is_exported_without_its_neighbours(flight: Flight, tmp_path: Path) -> None:
    output = tmp_path / "mine.zip"
    done = cotrain("recorder", "export", flight.files[1], output, "--run", B, "--json")
    assert (done.exit_code, json.loads(done.stdout)["runs"]) == (0, [B])
    assert A.encode() not in output.read_bytes()
    assert read_cycle(output).before.keys() == {RunId(B)}
    assert cotrain("replay", output).exit_code == 0
    refused = cotrain("recorder", "export", flight.files[1], output, "--run", "unknown")
    assert (refused.exit_code, refused.output) == (2, "Run unknown is not in this cycle.\n")


def test_a_replay_needs_neither_redis_nor_its_library() -> None:
    file, model = str(RECORDED / "story-1.zip"), str(RECORDED / "model")
    done = run([sys.executable, "-c", WITHOUT_REDIS, file, "--base-model", model])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Nothing diverged.\n")
