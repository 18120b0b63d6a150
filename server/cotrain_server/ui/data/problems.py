"""Health problems and their remedies, for the dashboard. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cotrain_server.ui.number_format import duration, percent, plural, size

#: Maximum wait of a pool's oldest op in normal operation.
OLDEST_OP_S = 60.0
OLDEST_GAP_S = 120.0
REDIS_MEMORY_PART = 0.7
#: Part of the disk that is free in normal operation.
DISK_FREE_PART = 0.05

_NO_WORKER = "Start one with cotrain serve or docker compose up worker. Its log has the reason of its end."
_HELP: Sequence[tuple[str, str]] = (
    ("No worker for", _NO_WORKER),
    ("No worker is", _NO_WORKER),
    ("No scheduler", "Start one: nothing is planned without it. Accepted requests wait, and are not lost."),
    ("Redis does not", "Start it, or check COTRAIN_REDIS_URL. Clients wait, and continue."),
    ("Redis could lose", "Set `appendonly yes` and `appendfsync always`, or accept the loss with COTRAIN_ACCEPT_DATA_LOSS."),
    ("Redis", "Check the log of Redis and its disk. Clients wait, and continue."),
    ("The disk", "Free space on the disk of the data folder: requests are refused until then."),
    ("This process", "It is stopping. There is nothing to do."),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One health problem."""

    level: Literal["bad", "warn"]  # `bad`: a component does not run
    text: str
    todo: str


def problems_of(status: Mapping[str, Any], disk_reserve_bytes: int) -> list[Problem]:
    """Return the problems, the worst first, from the operator's `/status`."""
    reasons = status["reasons"]
    if any(map(_exits, status["pools"])) and any(map(_is_of_workers, reasons)):
        # The remedy of a missing worker has the reason of its exits, so its crash loop has no problem of its own.
        reasons = [each for each in reasons if not each.startswith("worker-")]
    found = [Problem("bad", reason, _help(reason, status["pools"])) for reason in reasons]
    for pool in status["pools"]:
        found += _of_pool(pool, status["reasons"])
    found += _of_host(status, disk_reserve_bytes)
    return sorted(found, key=lambda problem: problem.level != "bad")


def _is_of_workers(reason: str) -> bool:
    return reason.startswith("No worker")


def _help(reason: str, pools: Sequence[Mapping[str, Any]]) -> str:
    if _is_of_workers(reason) and (exits := " ".join(map(_exits, pools)).strip()):
        return exits
    return next(
        (text for start, text in _HELP if reason.startswith(start)),
        "Its log has the reason; cotrain serve starts it again.",
    )


def _of_pool(pool: Mapping[str, Any], reasons: Sequence[str]) -> Iterator[Problem]:
    name, alive = pool["base_model"], {worker["id"] for worker in pool["workers"]}
    reported = {f"No worker for {name} is running.", "No worker is running."}
    is_reported = not alive and not reported.isdisjoint(reasons)
    missing = [worker for worker in pool["workers_unavailable"] if worker not in alive]
    if missing and not is_reported:
        yield Problem(
            "bad" if not alive else "warn",
            f"{plural(len(missing), 'worker')} of {name} without a heartbeat: {', '.join(missing)}.",
            _exits(pool)
            or "Its runs wait until it is back or another worker takes them. Its log has the reason of its end.",
        )
    for worker in pool["workers"]:
        if not worker["accepts_saves"]:
            yield Problem(
                "warn",
                f"Worker {worker['id']} of {name} writes saves slower than they arrive; saves wait.",
                "Use a faster disk for its data folder, or save less often.",
            )
    if pool["queue"]["oldest_s"] > OLDEST_OP_S:
        yield Problem(
            "warn",
            f"The oldest request of {name} has waited for {duration(pool['queue']['oldest_s'])}.",
            "The page Cycles shows if its worker is busy with other tenants or idle.",
        )
    if pool["queue"]["oldest_gap_s"] > OLDEST_GAP_S:
        yield Problem(
            "warn",
            f"A run of {name} has waited for a missing request for {duration(pool['queue']['oldest_gap_s'])}.",
            "Its client failed to send it. The requests after it fail after COTRAIN_GAP_LIMIT_S.",
        )


def _exits(pool: Mapping[str, Any]) -> str:
    """Return the last exits of the workers without a heartbeat; empty if none is known."""
    alive = {worker["id"] for worker in pool["workers"]}
    exits = pool.get("worker_exits", {})
    return " ".join(f"{name}: {each['text']}" for name, each in exits.items() if name not in alive)


def _of_host(status: Mapping[str, Any], disk_reserve_bytes: int) -> Iterator[Problem]:
    redis, disk = status["redis"], status["disk"]
    free_bytes, total_bytes = disk["free_bytes"], disk["total_bytes"]
    limit = redis["memory_limit_bytes"]
    if limit and redis["memory_bytes"] > REDIS_MEMORY_PART * limit:
        yield Problem(
            "warn",
            f"Redis uses {percent(redis['memory_bytes'] / limit)} of its memory.",
            "Raise its maxmemory before it is full: a full Redis rejects writes.",
        )
    low_bytes = max(2 * disk_reserve_bytes, DISK_FREE_PART * total_bytes)
    if disk_reserve_bytes < free_bytes < low_bytes:
        yield Problem(
            "warn",
            f"The disk has {size(free_bytes)} of {size(total_bytes)} left; "
            f"below {size(disk_reserve_bytes)} requests are refused.",
            "Delete checkpoints, or make the disk larger.",
        )
