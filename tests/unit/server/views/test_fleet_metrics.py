"""Tenants with their own series in a scrape."""

from cotrain_server.views.fleet_metrics import top_tenants
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.fleet import QueueStatus
from cotrain_store.monitoring.metrics import OTHERS, TENANTS_SHOWN


def queue(number: int, tokens: int = 0, samples: int = 0) -> QueueStatus:
    return QueueStatus(TenantId(f"t{number:03}"), ops=0, tokens=tokens, bytes=0, samples_waiting=samples)


def test_the_busiest_tenants_come_first_by_tokens_then_by_samples() -> None:
    shown = top_tenants([queue(0), queue(1, samples=5), queue(2, tokens=1)])
    assert [tenant.tenant for tenant in shown] == ["t002", "t001", "t000"]


def test_the_other_tenants_are_summed_up() -> None:
    queues = [queue(number, samples=1) for number in range(TENANTS_SHOWN + 3)]
    shown = top_tenants(queues)
    assert len(shown) == TENANTS_SHOWN + 1
    assert (shown[-1].tenant, shown[-1].samples_waiting) == (OTHERS, 3)
