"""Metrics in docs/reference/metrics.md, in the processes, and in the list of definitions, which must be equal."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cotrain_server.services import Services
from cotrain_server.views import fleet_metrics as collector
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, TenantId, WorkerId
from cotrain_store.monitoring.definitions import METRICS, Kind, Source, of
from cotrain_store.monitoring.fleet import Fleet, PoolStatus, QueueStatus, RedisStatus, WorkerStatus
from cotrain_store.monitoring.metrics import REGISTRIES
from docs.tables import PAGE, with_metrics
from tests.support.stack import pool_record_for_tests

NUMBERS = {"train": 1.0, "idle": 2.0}


async def fleet_found(*_: object) -> Fleet:
    worker = WorkerHeartbeat(
        WorkerId("w0"), 1, "", "cpu", 1.0, 0, 0, 0.0, device_seconds=NUMBERS,
        kv_cache_ratio=0.5, adapters={"device": 1}, adapter_bytes={"device": 1},
        self_check={"ok": True, "logprobs": 0.0, "gradients": 0.0, "weights": 0.0},
    )  # fmt: skip
    ids = (
        WorkerStatus(WorkerId("w0"), worker, 0, None, is_known=True),
        WorkerStatus(WorkerId("w1"), None, 0, None, is_known=True),
    )
    queues = (QueueStatus(TenantId("t"), 0, 0, 0),)
    pool = PoolStatus(pool_record_for_tests(), ids, queues=queues)
    return Fleet((pool,), RedisStatus("8", True, "always", 0, True, 0), True, 1)


async def scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the fleet metrics of one pool with one worker, a missing one, and one tenant."""

    async def bytes_found(*_: object) -> dict[TenantId, int]:
        return {TenantId("t"): 0}

    def nothing_wrong(*_: object) -> list[str]:
        return []

    async def failures_found(*_: object) -> dict[PoolId, list[tuple[TenantId, int]]]:
        return {pool_record_for_tests().id: [(TenantId("t"), 1)]}

    monkeypatch.setattr(collector, "read_fleet", fleet_found)
    monkeypatch.setattr(collector, "most_failures", failures_found)
    monkeypatch.setattr(collector, "largest_run_bytes", bytes_found)
    monkeypatch.setattr(collector, "largest_checkpoint_bytes", bytes_found)
    monkeypatch.setattr(collector, "reasons_not_ready", nothing_wrong)
    services = SimpleNamespace(
        settings=SimpleNamespace(data_dir=tmp_path, disk_reserve_bytes=1, base_models=()), connection=None
    )
    return (await collector.fleet_metrics(cast("Services", services))).decode()


def test_the_page_is_what_the_definitions_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_metrics(page), "run `make pages`, and commit the page"


def test_a_row_of_a_removed_metric_goes_and_a_missing_one_is_named() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_metrics(page + "| `cotrain_gone` | | Gone. |\n") == page
    with pytest.raises(ValueError, match="cotrain_build_info"):
        with_metrics(page.replace("| `cotrain_build_info` |", "| gone |"))


def test_names_have_base_units_and_counters_end_in_total() -> None:
    labels = {
        "pool", "worker", "kind", "tenant", "phase", "tier", "state",
        "route", "code", "op", "reason", "version", "outcome",
    }  # fmt: skip
    for name, metric in METRICS.items():
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert not re.search(r"_(ms|millis|minutes|kb|mib|percent)(_|$)", metric.name), name
        assert set(metric.labels) <= labels, name
        assert metric.help.endswith(".") or ";" in metric.help, name


@pytest.mark.parametrize("source", REGISTRIES)
def test_a_process_has_every_metric_defined_for_it(source: Source) -> None:
    families = {family.name: family for family in _described(REGISTRIES[source])}
    defined = {metric.name.removesuffix("_total"): metric for metric in of(source)}
    assert families.keys() == defined.keys()
    for name, family in families.items():
        assert (family.type, family.documentation) == (defined[name].kind, defined[name].help)


async def test_the_fleet_page_has_every_metric_defined_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = await scraped(tmp_path, monkeypatch)
    shown = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for each in family.samples for label in each.labels}
        shown[name] = (family.type, family.documentation, labels)
    assert shown == {m.name: (m.kind, m.help, set(m.labels)) for m in of(Source.FLEET)}


def _described(registry: Any) -> list[Any]:
    return [family for each in set(registry._names_to_collectors.values()) for family in each.describe()]
