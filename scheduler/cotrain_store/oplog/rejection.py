"""What becomes of an op that is accepted and will never run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cotrain_store.keys import result_keys
from cotrain_store.messages.ops import OpKind, QueuedOp

if TYPE_CHECKING:
    from cotrain_store.messages.ids import RunId
    from cotrain_store.messages.results import Result


def rejection(run: RunId, failure: Result) -> dict[str, Any]:
    """Write, as `reject.lua` reads it, what the op resolves to and what is left of it in the log."""
    op = QueuedOp(run, 0, OpKind.REJECTED, 0, "inline", len(failure.payload), time.time())
    return {
        "result": failure.encode().decode(),
        "ttl_ms": result_keys.SMALL_RESULT_TTL_MS,
        "body": failure.payload.decode(),
        "envelope": op.envelope(),
    }
