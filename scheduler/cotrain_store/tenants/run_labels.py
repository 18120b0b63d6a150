"""Notes and tags of runs: written at any time, and what lists are filtered by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.errors import RecordQuotaReached, RunNotFound
from cotrain_store.keys import run_keys, tenant_keys
from cotrain_store.messages.ids import RunId
from cotrain_store.messages.rows import tags_of
from cotrain_store.redis_client.scripts import async_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.runs import RunRecord
    from cotrain_store.redis_client.connection import Connection

#: Runs whose labels are read in one round trip.
READ_AT_ONCE = 1_000


@dataclass(frozen=True)
class LabelQuery:
    """What the labels of a run must hold."""

    tags: tuple[str, ...] = ()
    """All of these."""
    text: str = ""
    """Words that each stand in the note or in a tag, whatever their case."""

    def matches(self, note: str, tags: Sequence[str]) -> bool:
        """Tell whether a run with these labels is looked for."""
        written = "\n".join([note, *tags]).casefold()
        return set(self.tags) <= set(tags) and all(
            word in written for word in self.text.casefold().split()
        )

    def __bool__(self) -> bool:
        return bool(self.tags or self.text.split())


class RunLabels:
    """The notes and tags of a tenant's runs."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._label = async_script(connection, "run_label")

    async def set(
        self,
        run: RunRecord,
        max_record_bytes: int,
        *,
        note: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        """Write a run's note or its tags; None: they stay.

        Raises:
            RunNotFound: it is not made yet.
            RecordQuotaReached: the tenant's records have as many bytes as are kept.
        """
        args: dict[str, str | int | float] = {
            "run": run.id, "tenant": run.tenant, "created_at": run.created_at,
            "max_record_bytes": max_record_bytes,
        }  # fmt: skip
        if note is not None:
            args["note"] = note
        if tags is not None:
            args["tags"] = json.dumps(list(dict.fromkeys(tags))) if tags else ""
        script_keys = [run_keys.run(run.id), tenant_keys.labelled_runs(run.tenant)]
        answer = await self._label(script_keys, args)
        if answer == b"GONE":
            raise RunNotFound
        if answer == b"RECORDS":
            raise RecordQuotaReached

    async def matching(self, tenant: TenantId, query: LabelQuery) -> frozenset[str]:
        """Find a tenant's runs by their labels; those without any are never found."""
        names = await self._redis.zrange(tenant_keys.labelled_runs(tenant), 0, -1)
        found: set[str] = set()
        for first in range(0, len(names), READ_AT_ONCE):
            part = [RunId(name.decode()) for name in names[first : first + READ_AT_ONCE]]
            labels = await self.of(part)
            found |= {run for run, (note, tags) in labels.items() if query.matches(note, tags)}
        return frozenset(found)

    async def of(self, runs: Sequence[RunId]) -> Mapping[RunId, tuple[str, tuple[str, ...]]]:
        """Read the notes and tags of runs that were found through their tenant."""
        pipeline = self._redis.pipeline(transaction=False)
        for run in runs:
            pipeline.hmget(run_keys.run(run), ["note", "tags"])
        rows = await pipeline.execute() if runs else []
        return {
            run: ((note or b"").decode(), tags_of(tags))
            for run, (note, tags) in zip(runs, rows, strict=True)
        }
