"""Every worker: where its runs are, what it has memory for, and whether it is being drained; for the operator."""

from __future__ import annotations

from typing import Any

from cotrain_server.administration.workers import list_workers
from cotrain_server.ui.page import Look, Page


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data."""
    return {"workers": [worker.model_dump() for worker in await list_workers(look.services)]}


PAGE = Page("/ui/workers", "Workers", "workers.html", read, poll_s=3, for_operator=True)
