"""Histograms that count many equal values at once.

Labels of tenants: the first hundred have their own, and keep it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.metrics import OTHERS, TENANTS_SHOWN, CountedHistogram, TenantLabels


def test_many_equal_values_count_like_one_after_the_other() -> None:
    ends, values = (0.1, 1.0, 3.0), [(0.05, 3), (0.1, 1), (2.0, 4), (50.0, 2)]
    registries = [CollectorRegistry() for _ in range(2)]
    usual, ours = (CountedHistogram("h", "Help.", ("pool",), buckets=ends, registry=each) for each in registries)
    for value, times in values:
        ours.labels("p").observe_times(value, times)
        for _ in range(times):
            usual.labels("p").observe(value)
    wanted, found = (
        [line for line in generate_latest(each).splitlines() if b"_created" not in line] for each in registries
    )
    assert found == wanted


def test_the_first_hundred_tenants_keep_their_label_and_others_share_one() -> None:
    labels = TenantLabels()
    tenants = [TenantId(f"t{number}") for number in range(TENANTS_SHOWN + 5)]
    for _ in range(2):
        shown = [labels.label(tenant) for tenant in tenants]
        assert shown == [*tenants[:TENANTS_SHOWN], *[OTHERS] * 5]
