"""Health problems and their remedies, for the dashboard. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cotrain_server.ui.number_format import duration, percent, plural, size

#: Maximum wait of a pool's oldest op in normal operation.
OLDEST_OP_S = 60.0
OLDEST_GAP_S = 120.0
REDIS_MEMORY_PART = 0.7

_HELP: Sequence[tuple[str, str]] = (
    ("No worker for", "Start one: `cotrain serve` does, or `docker compose up worker`. Its log says why it ended."),
    ("No worker is", "Start one: `cotrain serve` does, or `docker compose up worker`. Its log says why it ended."),
    ("No scheduler", "Start one: nothing is planned without it. What was accepted waits, and is not lost."),
    ("Redis does not", "Start it, or look whether COTRAIN_REDIS_URL is right. Clients wait, and go on."),
    ("Redis could lose", "Set `appendonly yes` and `appendfsync always`, or accept the loss with COTRAIN_ACCEPT_DATA_LOSS."),
    ("Redis", "Look at Redis' log and at its disk. Clients wait, and go on."),
    ("The disk", "Make room on the disk of the data folder: requests are refused until then."),
    ("This process", "It is stopping. Nothing is to be done."),
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One health problem."""

    level: Literal["bad", "warn"]  # `bad`: a component does not run
    text: str
    todo: str


def problems_of(status: Mapping[str, Any], disk_reserve_bytes: int) -> list[Problem]:
    """Return the problems, the worst first, from the operator's `/status`."""
    found = [Problem("bad", reason, _help(reason)) for reason in status["reasons"]]
    for pool in status["pools"]:
        found += _of_pool(pool)
    found += _of_host(status, disk_reserve_bytes)
    return sorted(found, key=lambda problem: problem.level != "bad")


def _help(reason: str) -> str:
    return next(
        (text for start, text in _HELP if reason.startswith(start)),
        "Its log says why; `cotrain serve` tries again.",
    )


def _of_pool(pool: Mapping[str, Any]) -> Iterator[Problem]:
    name, alive = pool["base_model"], {worker["id"] for worker in pool["workers"]}
    if missing := [worker for worker in pool["workers_unavailable"] if worker not in alive]:
        yield Problem(
            "bad" if not alive else "warn",
            f"{plural(len(missing), 'worker')} of {name} without a heartbeat: {', '.join(missing)}.",
            "Its runs wait until it is back or another worker takes them; its log says why it ended.",
        )
    for worker in pool["workers"]:
        if not worker["accepts_saves"]:
            yield Problem(
                "warn",
                f"Worker {worker['id']} of {name} writes saves slower than they come; saves wait.",
                "Give its data folder a faster disk, or save less often.",
            )
    if pool["queue"]["oldest_s"] > OLDEST_OP_S:
        yield Problem(
            "warn",
            f"The oldest request of {name} has waited for {duration(pool['queue']['oldest_s'])}.",
            "Look at Cycles: whether its worker is busy with others, or stands still.",
        )
    if pool["queue"]["oldest_gap_s"] > OLDEST_GAP_S:
        yield Problem(
            "warn",
            f"A run of {name} waits for a request that never came, for "
            f"{duration(pool['queue']['oldest_gap_s'])} now.",
            "Its client failed on the way. After COTRAIN_GAP_LIMIT_S what waits behind it fails.",
        )


def _of_host(status: Mapping[str, Any], disk_reserve_bytes: int) -> Iterator[Problem]:
    redis, free_bytes = status["redis"], status["disk"]["free_bytes"]
    limit = redis["memory_limit_bytes"]
    if limit and redis["memory_bytes"] > REDIS_MEMORY_PART * limit:
        yield Problem(
            "warn",
            f"Redis uses {percent(redis['memory_bytes'] / limit)} of its memory.",
            "Raise its maxmemory before it is full: it takes no writes then.",
        )
    if disk_reserve_bytes < free_bytes < 2 * disk_reserve_bytes:
        yield Problem(
            "warn",
            f"The disk has {size(free_bytes)} left; below {size(disk_reserve_bytes)} requests are refused.",
            "Delete checkpoints, or make the disk larger.",
        )
