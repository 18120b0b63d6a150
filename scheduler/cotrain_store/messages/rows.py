"""How the rows of Redis are read as records: what was written once, with what became of it since."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from cotrain_store.messages.encoding import decode
from cotrain_store.messages.pools import PoolRecord
from cotrain_store.messages.runs import LoraSpec, RunRecord, RunState
from cotrain_store.messages.sessions import SessionRecord
from cotrain_store.messages.weights import WeightsRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What `weights_record` reads.
WEIGHTS_FIELDS = ("record", "digest", "size", "optimizer")


def session_record(row: dict[bytes, bytes]) -> SessionRecord:
    """Read a session, as its hash has it."""
    raw = json.loads(row[b"record"])
    raw["tags"] = tuple(raw["tags"])
    raw["project_id"] = row.get(b"project_id", b"").decode() or raw["project_id"]
    raw["finish_reason"] = row.get(b"reason", b"").decode()
    finished = row.get(b"finished_at")
    raw["finished_at"] = float(finished) if finished else None
    return decode(SessionRecord, raw)


def run_record(row: dict[bytes, bytes]) -> RunRecord:
    """Read a run, as its hash has it."""
    raw = json.loads(row[b"record"])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    raw["state"] = RunState(row.get(b"state", b"live").decode())
    last = row.get(b"last_request_at")
    raw["last_request_at"] = float(last) if last else None
    raw["weights_epoch"] = int(row.get(b"weights_epoch", b"0"))
    raw["rolled_back_to"] = row.get(b"rolled_back_to", b"").decode()
    raw["note"] = row.get(b"note", b"").decode()
    raw["tags"] = tags_of(row.get(b"tags"))
    return decode(RunRecord, raw)


def tags_of(field: bytes | None) -> tuple[str, ...]:
    """Read the tags of a run."""
    return tuple(json.loads(field)) if field else ()


def pool_record(row: bytes) -> PoolRecord:
    """Read a pool, as its worker wrote it."""
    raw = json.loads(row)
    raw["eos_token_ids"] = tuple(raw.get("eos_token_ids", ()))
    return decode(PoolRecord, raw)


def weights_record(row: Sequence[bytes]) -> WeightsRecord:
    """Read a record of weights and what became of them (WEIGHTS_FIELDS)."""
    raw = json.loads(row[0])
    raw["lora"] = decode(LoraSpec, raw["lora"])
    return replace(
        decode(WeightsRecord, raw),
        digest=row[1].decode(),
        size=int(row[2]),
        optimizer_digest=(row[3] or b"").decode(),
    )
