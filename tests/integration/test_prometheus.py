"""A real Prometheus scrapes a real server under load: two API processes, a scheduler, a worker.

Every expression of the boards and of the alerts has a value, and nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cotrain import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from cotrain.cli import command_line
from cotrain_server.supervisor.data_folder import METRICS_TARGETS, DataFolder
from tests.support.observe import FOLDER, RULES, alerts, queries
from tests.support.ports import free_port
from tests.support.processes import Process
from tests.support.serving import Serving

PROMETHEUS = shutil.which("prometheus")
PATIENCE_S = 300.0
KEYS = {"ann": "tml-ann_of-the-first-lab", "bob": "tml-bob_of-the-second-lab"}
RANGE = "20s"
#: Pause of a tenant between two rounds. Without it, the server computes all the time that the test waits.
PAUSE_S = 2.0

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed: NO BOARD IS TESTED (Debian: prometheus)"
)


@dataclass
class Watched:
    """A server whose Prometheus has seen a load that is over by now."""

    serving: Serving
    url: str
    unanswered: set[str]
    """The expressions that never had a value."""

    def query(self, expr: str) -> list[dict[str, Any]]:
        return query(self.url, expr)

    def value(self, expr: str) -> float:
        (only,) = self.query(expr)
        return float(only["value"][1])


def query(url: str, expr: str) -> list[dict[str, Any]]:
    at = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    with urllib.request.urlopen(at) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def expressions() -> list[str]:
    return [expr.replace("$__rate_interval", RANGE) for expr in queries()]


@pytest.fixture(scope="module")
def watched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    ports = {"COTRAIN_METRICS_PORT": str(first := free_port())}
    keys = [f"{name}={key}" for name, key in KEYS.items()]
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(Serving(folder / "data", [f"tiny={tiny_model}"], keys, settings=ports))
        second, second_metrics = free_port(), free_port()
        assert second_metrics not in range(first, first + 3)
        settings = {
            "COTRAIN_REDIS_URL": f"unix://{DataFolder(folder / 'data').socket()}",
            "COTRAIN_DATA_DIR": str(folder / "data"),
            "COTRAIN_API_KEYS": ",".join(keys),
            "COTRAIN_PORT": str(second),
            "COTRAIN_METRICS_PORT": str(second_metrics),
        }
        stack.enter_context(Process("cotrain_server", settings, folder / "second.log"))
        url = stack.enter_context(prometheus(folder, second_metrics))
        addresses = dict(zip(KEYS, (serving.address, f"http://127.0.0.1:{second}"), strict=True))
        wait_for(f"{addresses['bob']}/healthz")
        unanswered = set(expressions())
        over = threading.Event()
        tenants = [threading.Thread(target=work, args=(addresses[n], KEYS[n], over)) for n in KEYS]
        for tenant in tenants:
            tenant.start()
        check = ["selfcheck", "--base-url", serving.address, "--data-dir", str(folder / "data")]
        checked = CliRunner().invoke(command_line([]), check, env={"COTRAIN_ADMIN_KEY": ""})
        assert checked.exit_code == 0, checked.output
        try:
            deadline = time.monotonic() + PATIENCE_S / 2
            while unanswered and time.monotonic() < deadline:
                time.sleep(1)
                unanswered = {expr for expr in unanswered if not query(url, expr)}
        finally:
            over.set()
            for tenant in tenants:
                tenant.join()
        time.sleep(6)  # a heartbeat, and two scrapes behind it
        yield Watched(serving, url, unanswered)


@contextlib.contextmanager
def prometheus(folder: Path, second_metrics: int) -> Iterator[str]:
    """Run it as docker/observe has it, but every second, and by the file that `cotrain serve` writes."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"] = [
        {"job_name": "served", "file_sd_configs": [{"files": [f"{folder}/data/{METRICS_TARGETS}"]}]},
        {"job_name": "cotrain-api", "static_configs": [{"targets": [f"127.0.0.1:{second_metrics}"]}]},
    ]  # fmt: skip
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert PROMETHEUS is not None
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(f"http://{address}/-/ready")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url).close()
            return
        assert time.monotonic() < deadline, url
        time.sleep(0.1)


def work(address: str, key: str, over: threading.Event) -> None:
    """Train, save and sample until it is over; one request of each round waits for others."""
    datum = Datum(
        model_input=ModelInput.from_ints(list(range(1, 65))),
        loss_fn_inputs={"target_tokens": list(range(2, 66)), "weights": [1.0] * 64},
    )
    with ServiceClient(base_url=address, api_key=key) as service:
        run = service.create_lora_training_client("tiny", rank=4)
        while not over.is_set():
            steps = []
            for _ in range(3):
                run.forward_backward([datum] * 4, "cross_entropy")
                steps.append(run.optim_step(AdamParams(learning_rate=1e-3)))
            steps[-1].result(PATIENCE_S)
            run.save_state("same-name", overwrite=True).result(PATIENCE_S)
            sampler = run.save_weights_and_get_sampling_client()
            samples = [
                sampler.sample(ModelInput.from_ints([1, 2, 3]), 4, SamplingParams(max_tokens=64)) for _ in range(4)
            ]
            for sample in samples:
                sample.result(PATIENCE_S)
            over.wait(PAUSE_S)


def test_every_expression_of_the_boards_and_of_the_alerts_has_a_value(watched: Watched) -> None:
    assert watched.unanswered == set()


def test_every_process_is_scraped_and_the_rules_are_in_force(watched: Watched) -> None:
    up = {each["metric"]["job"]: float(each["value"][1]) for each in watched.query("sum by (job) (up)")}
    assert up == {"cotrain-api": 2, "cotrain-fleet": 1, "cotrain-scheduler": 1, "cotrain-worker": 1}
    with urllib.request.urlopen(f"{watched.url}/api/v1/rules") as answer:
        (group,) = json.load(answer)["data"]["groups"]
    health = {rule["name"]: rule["health"] for rule in group["rules"]}
    assert health == dict.fromkeys(alerts(), "ok")
    assert watched.query('ALERTS{alertstate="firing"}') == []


def test_each_metric_comes_from_one_kind_of_process(watched: Watched) -> None:
    names = 'count by (__name__) (count by (__name__, job) ({__name__=~"cotrain_.+"}))'
    twice = [each["metric"] for each in watched.query(f"{names} > 1")]
    assert twice == []


def test_nothing_is_counted_twice(watched: Watched) -> None:
    request = urllib.request.Request(f"{watched.serving.address}/status", headers=watched.serving.operator)
    with urllib.request.urlopen(request) as answer:
        (pool,) = json.load(answer)["pools"]
    counters = pool["counters"]
    value = watched.value
    assert value("sum(cotrain_cycles_total)") == counters["cycles"] > 0
    assert value("sum(cotrain_cycle_duration_seconds_count)") == counters["cycles"]
    resolved = counters["resolved_ops"]
    assert value('sum(cotrain_requests_accepted_total{op!="sample"})') == resolved
    assert value("sum(cotrain_op_latency_seconds_count)") == resolved
    assert value("sum(cotrain_op_wait_seconds_count)") == resolved
    samples = counters["sample_requests"]
    assert value('sum(cotrain_requests_accepted_total{op="sample"})') == samples
    assert value("sum(cotrain_sample_time_to_first_token_seconds_count)") == samples
    each = {tenant["metric"]["tenant"] for tenant in watched.query("cotrain_tenant_device_seconds_total")}
    assert len(each) == len(KEYS)
    assert value("sum(cotrain_runs)") == len(KEYS)  # closed with their sessions


def test_the_devices_time_is_all_booked(watched: Watched) -> None:
    """Over the life of the worker, to a heartbeat and the lap before it."""
    (all_phases,) = watched.query("sum(cotrain_device_seconds_total)")
    shares = watched.query("rate(cotrain_device_seconds_total[1m])")
    assert {each["metric"]["phase"] for each in shares} == {"train", "optim", "sample", "idle"}
    busy = watched.value('sum(cotrain_device_seconds_total{phase!="idle"})')
    tenants = watched.value("sum(cotrain_tenant_device_seconds_total)")
    assert 0 < tenants <= busy * 1.02 < float(all_phases["value"][1]) * 1.02
