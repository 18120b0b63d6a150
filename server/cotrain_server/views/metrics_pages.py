"""What an API process shows on its metrics port: what it counts itself, and what the store knows of the fleet."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from cotrain_server.views.fleet_metrics import fleet_metrics
from cotrain_server.views.process_metrics import process_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cotrain_server.services import Services

#: What Prometheus waits by default.
TIMEOUT_S = 10.0


def metrics_pages(services: Services) -> Mapping[str, Callable[[], bytes]]:
    """Return the pages, which a thread may ask for while this event loop runs."""
    loop = asyncio.get_running_loop()

    def fleet() -> bytes:
        asked = asyncio.run_coroutine_threadsafe(fleet_metrics(services), loop)
        return asked.result(TIMEOUT_S)

    return {"/metrics": partial(process_metrics, services), "/metrics/fleet": fleet}
