"""A histogram that takes many equal observations at once: a decode step gives hundreds of sequences a token each."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric as Family

    from cotrain_store.monitoring.definitions import Metric


class Series:
    """One set of labels."""

    def __init__(self, ends: tuple[float, ...]) -> None:
        self._ends = ends
        self._lock = threading.Lock()
        self.counts = [0] * len(ends)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value so often."""
        with self._lock:
            self.counts[bisect_left(self._ends, value)] += times
            self.sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return each bucket's end with all it and those below it hold, and the sum of all values."""
        with self._lock:
            counts, total = list(self.counts), self.sum
        ends = map(floatToGoString, self._ends)
        return list(zip(ends, map(float, accumulate(counts)), strict=True)), total


class CountedHistogram(Collector):
    """What prometheus_client's Histogram shows, with `series` for its `labels`."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._ends = (*metric.buckets, math.inf)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def series(self, *labels: str) -> Series:
        """Return the series with these labels."""
        return self._series.setdefault(labels, Series(self._ends))

    def describe(self) -> Iterable[Family]:
        """Name it, so that no other takes its name."""
        return [self._family()]

    @override
    def collect(self) -> Iterable[Family]:
        family = self._family()
        for labels, series in list(self._series.items()):
            family.add_metric(labels, *series.buckets())
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(
            self._metric.name, self._metric.help, labels=self._metric.labels
        )
