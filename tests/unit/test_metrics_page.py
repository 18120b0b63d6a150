"""docs/metrics.md lists every metric that a scrape has, with its labels and its own words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client.parser import text_string_to_metric_families

from cotrain_server.views import prometheus as collector
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.monitoring.metrics import REGISTRY
from cotrain_store.monitoring.status import PoolStatus, QueueStatus, RedisStatus
from tests.support.stack import POOL, pool_record_for_tests

if TYPE_CHECKING:
    import pytest

    from cotrain_server.services import Services

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


async def found(*_: object) -> Any:
    worker = WorkerHeartbeat(WorkerId("w0"), 1, "", "cpu", 1.0, 0, 0, 0.0)
    return PoolStatus(
        POOL, (worker,), 2, (WorkerId("w1"),), 0, 0,
        (QueueStatus(TenantId("t"), 0, 0, 0),), 0.0, 0.0, {},
    )  # fmt: skip


async def redis_found(*_: object) -> RedisStatus:
    return RedisStatus("8", True, "always", 0, True, 0)


async def run_bytes_found(*_: object) -> dict[TenantId, int]:
    return {TenantId("t"): 0}


async def scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Scrape a server of one pool with one worker, another one away, and one tenant."""
    monkeypatch.setattr(collector, "pool_status", found)
    monkeypatch.setattr(collector, "redis_status", redis_found)
    monkeypatch.setattr(collector, "largest_run_bytes", run_bytes_found)

    async def pools() -> list[Any]:
        return [pool_record_for_tests()]

    services = SimpleNamespace(
        futures=SimpleNamespace(waiters=0),
        settings=SimpleNamespace(data_dir=tmp_path),
        connection=None,
        records=SimpleNamespace(pools=pools),
    )
    of_process = collector.process_metrics(cast("Services", services))
    return (of_process + await collector.store_metrics(cast("Services", services))).decode()


def rows(text: str) -> list[str]:
    """Write a scrape as the page does: a row for each family."""
    labels_of = {
        each._name: each._labelnames  # type: ignore[attr-defined]  # shown nowhere else before a first count
        for each in {*REGISTRY._names_to_collectors.values()}
    }
    written = []
    for family in text_string_to_metric_families(text):
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        labels = ", ".join(f"`{each}`" for each in labels_of.get(family.name, sorted(own)))
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.endswith("_created"):  # when a counter began; prometheus_client adds it
            written.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return sorted(written)


async def test_the_page_has_every_metric_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = rows(await scraped(tmp_path, monkeypatch))
    told = [line for line in PAGE.read_text().splitlines() if line.startswith("| `cotrain_")]
    assert len(wanted) > 30
    assert sorted(told) == wanted, "\n".join(["", *wanted])
