"""It shows what prometheus_client's own histogram shows, for many observations at once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cotrain_store.monitoring.counted_histogram import CountedHistogram
from cotrain_store.monitoring.definitions import Kind, Metric, Source


def test_it_reads_as_the_usual_histogram() -> None:
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
