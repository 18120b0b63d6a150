"""Notes and tags of runs. They can be changed at any time, and lists can be filtered by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.runs import RunRecord, tags_of
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.redis_client.scripts import async_script

#: Number of runs whose labels are read in one round trip.
LABELS_READ_AT_ONCE = 1_000


@dataclass(frozen=True)
class LabelQuery:
    """Filter for the labels of a run."""

    tags: tuple[str, ...] = ()  # tags that the run must all have
    text: str = ""  # words that must all occur in the note or a tag, case-insensitive

    def matches(self, note: str, tags: Sequence[str]) -> bool:
        """Return True if a run with these labels matches."""
        written = "\n".join([note, *tags]).casefold()
        return set(self.tags) <= set(tags) and all(word in written for word in self.text.casefold().split())

    def __bool__(self) -> bool:
        return bool(self.tags or self.text.split())


class RunLabels:
    """Notes and tags of runs."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._label = async_script(connection, "run_label")

    async def set(
        self, run: RunRecord, max_record_bytes: int, *, note: str | None = None, tags: Sequence[str] | None = None
    ) -> None:
        """Write a run's note or its tags. None leaves them unchanged.

        Raises:
            RunNotFound: the run does not exist yet.
            RECORD_QUOTA_REACHED: the tenant's records would exceed their maximum bytes.
        """
        args: dict[str, str | int | float] = {
            "run": run.id, "tenant": run.tenant, "created_at": run.created_at,
            "max_record_bytes": max_record_bytes,
        }  # fmt: skip
        if note is not None:
            args["note"] = note
        if tags is not None:
            args["tags"] = json.dumps(list(dict.fromkeys(tags))) if tags else ""
        answer = await self._label(args)
        if answer == b"GONE":
            raise RunNotFound
        if answer == b"RECORDS":
            raise Refused(Reason.RECORD_QUOTA_REACHED)

    async def matching(self, tenant: TenantId, query: LabelQuery) -> frozenset[str]:
        """Return the labelled runs of a tenant that match. Runs without labels never match."""
        names = await self._redis.zrange(redis_keys.labelled_runs(tenant), 0, -1)
        found: set[str] = set()
        for first in range(0, len(names), LABELS_READ_AT_ONCE):
            part = [RunId(name.decode()) for name in names[first : first + LABELS_READ_AT_ONCE]]
            labels = await self.of(part)
            found |= {run for run, (note, tags) in labels.items() if query.matches(note, tags)}
        return frozenset(found)

    async def of(self, runs: Sequence[RunId]) -> Mapping[RunId, tuple[str, tuple[str, ...]]]:
        """Return the notes and tags of runs, which must have been read through their tenant."""
        rows = await replies(self._redis, (("HMGET", redis_keys.run(run), "note", "tags") for run in runs))
        return {run: ((note or b"").decode(), tags_of(tags)) for run, (note, tags) in zip(runs, rows, strict=True)}
