"""Alerts, each of which fires in its case and not in a neighbouring one, checked with Prometheus' rule tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import yaml

from tests.support.observe import RULES, alerts

PROMTOOL = shutil.which("promtool")
OF = '{pool="m", worker="w0"}'

pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: NO ALERT IS TESTED (Debian: prometheus)"
)


@dataclass(frozen=True)
class Case:
    """Series by name, with a value every 10 s. The first ones fire at `at`, and the second ones do not."""

    fires: dict[str, str]
    quiet: dict[str, str]
    at: str


def one(name: str, fires: str, quiet: str, at: str) -> Case:
    return Case({name: fires}, {name: quiet}, at)


def grows(name: str) -> Case:
    return one(f'{name}{{pool="m"}}', "3x30 4x30", "3x60", "6m")


ACCEPTED, REJECTED = ("cotrain_requests_accepted_total", 'cotrain_requests_rejected_total{reason="x"}')
FAILED, RESOLVED = ('cotrain_requests_failed_total{pool="m"}', 'cotrain_requests_resolved_total{pool="m"}')
AGE, DUE = f"cotrain_snapshot_age_seconds_max{OF}", f"cotrain_snapshot_due_seconds{OF}"
CASES = {
    "CotrainNotReady": one("cotrain_ready", "1x3 0x30", "1x3 0x11 1x30", "3m"),
    "CotrainWorkerAway": one(f"cotrain_worker_up{OF}", "1x3 0x40", "1x3 0x28 1x20", "6m"),
    "CotrainNoLeader": Case(
        {'cotrain_scheduler_leader{instance="a"}': "1x3 0x9", 'cotrain_scheduler_leader{instance="b"}': "0x12"},
        {'cotrain_scheduler_leader{instance="a"}': "1x3 0x9", 'cotrain_scheduler_leader{instance="b"}': "0x3 1x9"},
        "1m",
    ),
    "CotrainOldOp": one('cotrain_queue_oldest_seconds{pool="m"}', "61x40", "60x40", "6m"),
    "CotrainBacklog": one('cotrain_pool_backlog_seconds{pool="m"}', "601x40", "600x40", "6m"),
    "CotrainGap": one('cotrain_seq_gap_seconds_max{pool="m"}', "121x5", "120x5", "30s"),
    "CotrainReplayDiverged": grows("cotrain_replay_divergence_total"),
    "CotrainPoison": grows("cotrain_poison_ops_total"),
    "CotrainRollback": grows("cotrain_rollbacks_total"),
    "CotrainDiskLow": Case(
        {"cotrain_disk_free_bytes": "199x12", "cotrain_disk_reserve_bytes": "100x12"},
        {"cotrain_disk_free_bytes": "200x12", "cotrain_disk_reserve_bytes": "100x12"},
        "2m",
    ),
    "CotrainDiskFull": Case(
        {"cotrain_disk_free_bytes": "4x12", "cotrain_disk_total_bytes": "100x12"},
        {"cotrain_disk_free_bytes": "5x12", "cotrain_disk_total_bytes": "100x12"},
        "2m",
    ),
    "CotrainFailures": Case(
        {FAILED: "0+30x180", RESOLVED: "0+100x180"},
        {FAILED: "0+15x180", RESOLVED: "0+100x180"},
        "25m",
    ),
    "CotrainWorkerRestarts": one(
        f"cotrain_worker_epoch{OF}", "1x6 2x6 3x6 4x6 5x6", "1x6 2x6 3x6 4x12", "5m"
    ),
    "CotrainRedisMemory": one("cotrain_redis_memory_ratio", "0.71x40", "0.7x40", "6m"),
    "CotrainRefusals": Case(
        {ACCEPTED: "0+90x180", REJECTED: "0+10x180"},
        {ACCEPTED: "0+96x180", REJECTED: "0+4x180"},
        "25m",
    ),
    "CotrainSnapshotOld": Case({AGE: "61x12", DUE: "30x12"}, {AGE: "60x12", DUE: "30x12"}, "2m"),
}  # fmt: skip


def steps(values: str) -> str:
    """Convert `3x30` (three, thirty times) to the notation of promtool."""
    parts = []
    for part in values.split():
        value, _, times = part.rpartition("x")
        parts.append(f"{value}x{times}" if "+" in value else f"{value}+0x{int(times) - 1}")
    return " ".join(parts)


@dataclass(frozen=True)
class Question:
    """Question if any of some alerts fires at `at`, for the given series."""

    alerts: Sequence[str]
    series: dict[str, str]
    at: str

    def as_test(self, name: str) -> dict[str, object]:
        """Return promtool's test that none fires."""
        values = [{"series": each, "values": steps(given)} for each, given in self.series.items()]
        at = {"eval_time": self.at, "exp_alerts": []}
        return {
            "name": name,
            "interval": "10s",
            "input_series": values,
            "alert_rule_test": [{**at, "alertname": alert} for alert in self.alerts],
        }


SHOWS_ALL = ("CotrainNotReady", "CotrainNoLeader")
"""Alerts that fire without any data."""
AT_REST = sorted(CASES.keys() - {*SHOWS_ALL})
QUESTIONS = {
    **{f"{alert} in its case": Question([alert], case.fires, case.at) for alert, case in CASES.items()},
    **{f"{alert} next to it": Question([alert], case.quiet, case.at) for alert, case in CASES.items()},
    **{f"{alert} of nothing": Question([alert], {"up": "1x40"}, "5m") for alert in SHOWS_ALL},
    # Pool without requests, in which a ratio has no divisor.
    "at rest": Question(AT_REST, {ACCEPTED: "5x180"}, "25m"),
}


@pytest.fixture(scope="module")
def firing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Answer all questions in one run. promtool reports for each test the alert that fired."""
    file = tmp_path_factory.mktemp("alerts") / "test.yml"
    tests = [question.as_test(name) for name, question in QUESTIONS.items()]
    content = {"rule_files": [str(RULES)], "evaluation_interval": "10s", "tests": tests}
    file.write_text(yaml.safe_dump(content))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    head, *failed = output.split("    name: ")
    assert bool(done.returncode) == bool(failed), output
    assert head.split() in (["Unit", "Testing:", str(file), word] for word in ("SUCCESS", "FAILED:"))
    got = {name: each for name, _, each in (each.partition(",") for each in failed)}
    assert got.keys() <= QUESTIONS.keys()
    for name, each in got.items():
        asked = {f'alertname="{alert}"' for alert in QUESTIONS[name].alerts}
        assert any(name in each.replace(":", "=") for name in asked), each
    return {name: name in got for name in QUESTIONS}


def test_every_alert_has_a_case() -> None:
    assert alerts().keys() == CASES.keys()


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_in_its_case_only(firing: dict[str, bool], alert: str) -> None:
    assert firing[f"{alert} in its case"]
    assert not firing[f"{alert} next to it"]


@pytest.mark.parametrize("alert", SHOWS_ALL)
def test_an_alert_fires_without_any_data_too(firing: dict[str, bool], alert: str) -> None:
    assert firing[f"{alert} of nothing"]


def test_an_idle_server_raises_no_alert(firing: dict[str, bool]) -> None:
    assert not firing["at rest"]
