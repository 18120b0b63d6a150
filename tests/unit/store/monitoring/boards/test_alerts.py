"""Each alert fires in its case and not in its neighbour's: by Prometheus' own test of rules."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import yaml

from cotrain_store.monitoring.boards.alerts import ALERTS
from cotrain_store.monitoring.boards.files import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

PROMTOOL = shutil.which("promtool")
RULES = FOLDER / "rules.yml"
OF = '{pool="m", worker="w0"}'

pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: NO ALERT IS TESTED (Debian: prometheus)"
)


@dataclass(frozen=True)
class Case:
    """Series by name, a value for every ten seconds, of which the first fires at `at` and the second does not."""

    fires: dict[str, str]
    quiet: dict[str, str]
    at: str


def one(name: str, fires: str, quiet: str, at: str) -> Case:
    return Case({name: fires}, {name: quiet}, at)


def grows(name: str) -> Case:
    return one(f'{name}{{pool="m"}}', "3x30 4x30", "3x60", "6m")


ACCEPTED, REJECTED = (
    "cotrain_requests_accepted_total",
    'cotrain_requests_rejected_total{reason="x"}',
)
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
    "CotrainRedisMemory": one("cotrain_redis_memory_ratio", "0.71x40", "0.7x40", "6m"),
    "CotrainRefusals": Case(
        {ACCEPTED: "0+90x180", REJECTED: "0+10x180"},
        {ACCEPTED: "0+96x180", REJECTED: "0+4x180"},
        "25m",
    ),
    "CotrainSnapshotOld": Case({AGE: "61x12", DUE: "30x12"}, {AGE: "60x12", DUE: "30x12"}, "2m"),
}  # fmt: skip


def steps(values: str) -> str:
    """Write `3x30` (three, thirty times) as promtool does."""
    parts = []
    for part in values.split():
        value, _, times = part.rpartition("x")
        parts.append(f"{value}x{times}" if "+" in value else f"{value}+0x{int(times) - 1}")
    return " ".join(parts)


def firing(alert: str, series: dict[str, str], at: str, tmp_path: Path) -> bool:
    """Tell whether an alert fires, of series as they are; promtool says that it got none, or that it got some."""
    values = [{"series": name, "values": steps(each)} for name, each in series.items()]
    expected = {"eval_time": at, "alertname": alert, "exp_alerts": []}
    test = {"interval": "10s", "input_series": values, "alert_rule_test": [expected]}
    file = tmp_path / "test.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "10s", "tests": [test]}
    file.write_text(yaml.safe_dump(content))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    if done.returncode == 0:
        return False
    assert f'alertname:"{alert}"' in output.replace(" ", "") or f'alertname="{alert}"' in output, (
        output
    )
    return True


def test_every_alert_has_a_case() -> None:
    assert {alert.name for alert in ALERTS} == CASES.keys()


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_in_its_case_and_not_next_to_it(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    assert firing(alert, case.fires, case.at, tmp_path)
    assert not firing(alert, case.quiet, case.at, tmp_path)


@pytest.mark.parametrize("alert", ["CotrainNotReady", "CotrainNoLeader"])
def test_what_shows_nothing_at_all_fires_as_well(alert: str, tmp_path: Path) -> None:
    assert firing(alert, {"up": "1x40"}, "5m", tmp_path)


@pytest.mark.parametrize("alert", sorted(CASES.keys() - {"CotrainNotReady", "CotrainNoLeader"}))
def test_a_server_at_rest_alerts_of_nothing(alert: str, tmp_path: Path) -> None:
    """A pool without requests, where a ratio has nothing to divide by."""
    assert not firing(alert, {ACCEPTED: "5x180"}, "25m", tmp_path)
