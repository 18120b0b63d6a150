from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import engine
from bench.__main__ import main
from bench.support.roofline import Rates


def test_one_call_measures_and_writes_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "measure_rates", lambda *_: Rates(1e11, 1e10))  # otherwise it takes seconds
    call = ["engine", "--device", "cpu", "--preset", "smoke", "--lora-backend", "seg"]

    assert main([*call, "--out", str(tmp_path)]) == 0

    (written,) = tmp_path.glob("engine-cpu-*.json")
    report = json.loads(written.read_text())
    tiny = report["sizes"]["tiny"]
    measured = {(row["backend"], row["tenants"]) for row in tiny["tenants"]}
    assert measured == {("seg", 1), ("seg", 4)}
    assert {row["tenants"] for row in tiny["by_hand"]} == {4}
    assert tiny["phases"]
    assert {"command", "date", "torch", "load"} <= report["machine"].keys()
    printed = capsys.readouterr().out
    assert "kept: many_over_one at 4 tenants" in printed
    assert "MISSED: over_loop at 4 tenants" in printed
