"""What one worker counts, under its own labels. Any thread may count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.tenant_labels import OTHERS, TenantLabels

if TYPE_CHECKING:
    from prometheus_client import Counter

    from cotrain_store.messages.ids import TenantId, WorkerId
    from cotrain_store.messages.ops import OpKind


class WorkerMetrics:
    """The worker's part of `metrics`. `pool` is the base model."""

    def __init__(self, pool: str, worker: WorkerId) -> None:
        self._labels = (pool, worker)
        self._tenants = TenantLabels()
        self._device_seconds: dict[TenantId, Counter] = {}
        self.cycle_duration = metrics.CYCLE_DURATION.labels(*self._labels)
        self.snapshot_duration = metrics.SNAPSHOT_DURATION.labels(*self._labels)
        self.sample_queue = metrics.SAMPLE_QUEUE.labels(*self._labels)
        self.first_token = metrics.SAMPLE_FIRST_TOKEN.labels(*self._labels)
        self.inter_token = metrics.SAMPLE_INTER_TOKEN.series(*self._labels)

    def resolved(self, kind: OpKind, latency_s: float) -> None:
        """Count an op that resolved."""
        metrics.OP_LATENCY.labels(*self._labels, kind.value).observe(max(0.0, latency_s))

    def used_device(self, tenant: TenantId, seconds: float) -> None:
        """Count what a tenant's work took of the device's time."""
        counter = self._device_seconds.get(tenant)
        if counter is None:
            label = self._tenants.label(tenant)
            counter = metrics.TENANT_DEVICE_SECONDS.labels(*self._labels, label)
            if label != OTHERS:  # else this would grow with the tenants
                self._device_seconds[tenant] = counter
        counter.inc(seconds)
