"""GET fleet: how many workers each pool is to have, and what those do that there are. For the operator, and what scales for them."""

from __future__ import annotations

from cotrain.wire.model import WireModel


class FleetWorker(WireModel):
    """A living worker."""

    id: str
    state: str
    """`serving`, `draining` or `drained`."""
    is_draining: bool
    """The operator wants it drained, or its process is to end."""
    host: str
    device: str
    tokens_per_s: float
    """Measured, of training."""
    runs: int
    busy: float
    """What it computed of the last minute, from 0 to 1, sampling included."""
    backlog_s: float
    """Time that it needs for the training that waited for it when a worker of its pool was last free."""


class FleetPool(WireModel):
    """A base model that is or was served, or that this server is set to serve."""

    base_model: str
    pool: str | None
    """None: no worker has served it yet."""
    workers_wanted: int
    workers_unavailable: list[str]
    """Ids whose process gives no heartbeat, and whose runs are still theirs."""
    workers: list[FleetWorker]
    ops: int
    """Training requests that are accepted and not done."""
    tokens: int
    """Of those that are accepted and not run."""
    oldest_s: float
    """Age of the oldest request that can be run."""
    backlog_s: float
    """Time that the workers there are need for `tokens`; without one, that of one as it was measured last."""
    samples_waiting: int
    samples_running: int


class Fleet(WireModel):
    """All pools."""

    pools: list[FleetPool]
