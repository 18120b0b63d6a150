"""What this API process counts itself, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import generate_latest

from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.definitions import Source

if TYPE_CHECKING:
    from cotrain_server.services import Services


def process_metrics(services: Services) -> bytes:
    """Write it in the Prometheus text format."""
    metrics.LONGPOLL_WAITERS.set(services.futures.waiters)
    return generate_latest(metrics.REGISTRIES[Source.API])
