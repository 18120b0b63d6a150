"""Counted histograms, with the output of prometheus_client's own for many observations at once.

Labels of tenants: the first hundred have their own, and keep it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.definitions import Kind, Metric, Source
from cotrain_store.monitoring.metrics import OTHERS, TENANTS_SHOWN, CountedHistogram, TenantLabels


def test_a_counted_histogram_has_the_usual_output() -> None:
    ends, values = (0.1, 1.0, 3.0), [(0.05, 3), (0.1, 1), (2.0, 4), (50.0, 2)]
    metric = Metric(Source.WORKER, "h_seconds", Kind.HISTOGRAM, "Help.", ("pool",), ends)
    usual, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(metric.name, metric.help, metric.labels, buckets=ends, registry=usual)
    series = CountedHistogram(metric, ours).series("p")
    for value, times in values:
        series.observe(value, times)
        for _ in range(times):
            histogram.labels("p").observe(value)
    wanted = [line for line in generate_latest(usual).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == wanted


def test_the_first_hundred_tenants_keep_their_label_and_others_share_one() -> None:
    labels = TenantLabels()
    tenants = [TenantId(f"t{number}") for number in range(TENANTS_SHOWN + 5)]
    for _ in range(2):
        shown = [labels.label(tenant) for tenant in tenants]
        assert shown == [*tenants[:TENANTS_SHOWN], *[OTHERS] * 5]
