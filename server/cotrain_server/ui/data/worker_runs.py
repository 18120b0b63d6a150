"""Which runs keep a worker busy, and where each could go on instead. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from cotrain_store.messages.ids import RunId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cotrain.wire.admin import WorkerShown
    from cotrain_store.messages.ids import WorkerId

#: Of each worker.
RUNS_SHOWN = 5


def tokens_of_runs(cycles: Iterable[Mapping[str, Any]]) -> dict[RunId, tuple[str, int]]:
    """Count what each run trained on in these cycles; its tenant and its tokens, the most first."""
    tenants: dict[RunId, str] = {}
    tokens: Counter[RunId] = Counter()
    for cycle in cycles:
        for each in cycle["runs"]:
            run = RunId(each["run"])
            tenants[run] = each["tenant"]
            tokens[run] += each["tokens"]
    return {run: (tenants[run], count) for run, count in tokens.most_common()}


def busiest(
    tokens: Mapping[RunId, tuple[str, int]], owners: Mapping[RunId, WorkerId]
) -> dict[WorkerId, list[dict[str, Any]]]:
    """Give each worker the runs of it that trained on most."""
    found: defaultdict[WorkerId, list[dict[str, Any]]] = defaultdict(list)
    for run, (tenant, count) in tokens.items():
        if run in owners and len(found[owners[run]]) < RUNS_SHOWN:
            found[owners[run]].append({"run": run, "tenant": tenant, "tokens": count})
    return dict(found)


def targets_of(worker: WorkerShown, workers: Sequence[WorkerShown]) -> list[str]:
    """Name the workers that a run of this one could go to."""
    return [
        each.id
        for each in workers
        if each.pool == worker.pool and each.id != worker.id and each.state == "serving"
    ]
