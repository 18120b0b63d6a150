"""What `submit.lua` refuses, as the errors that its callers raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.errors import (
    BodySwept,
    QueueFull,
    RecordQuotaReached,
    RunBytesQuotaReached,
    RunClosed,
    RunFailed,
    RunNotFound,
    RunQuotaReached,
    RunTooLarge,
    SamplerQuotaReached,
    SeqConflict,
    SeqTooFar,
    UnreadQuotaReached,
    WeightsDeleted,
)
from cotrain_store.oplog.submission import MAX_SEQ_GAP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_store.oplog.submission import Submission

_OF_OPS: dict[str, Callable[[str], Exception]] = {
    "CONFLICT": lambda what: SeqConflict(f"{what} was already used with different content."),
    "FAR": lambda what: SeqTooFar(f"{what} is too far ahead (more than {MAX_SEQ_GAP} missing)."),
    "WEIGHTS": lambda _: WeightsDeleted(),
    "GONE": lambda _: RunNotFound(),
    "CLOSED": lambda _: RunClosed(),
    "FAILED": lambda _: RunFailed(),
    "BUSY": lambda _: QueueFull(),
    "UNREAD": lambda _: UnreadQuotaReached(),
    "RUNS": lambda _: RunQuotaReached(),
    "RECORDS": lambda _: RecordQuotaReached(),
    "SWEPT": lambda _: BodySwept(),
    "SAMPLERS": lambda _: SamplerQuotaReached(),
}


def refusal(answer: str, numbers: Sequence[int], asked: Submission) -> Exception | None:
    """Name the error of an answer; None for one that takes the op, or would.

    `numbers` follow the answer: of a run that would hold too much, what its tenant's runs hold, and what
    there is for them.
    """
    if asked.weighs and answer in ("RUN_BYTES", "RUN_DISK"):
        return _too_heavy(answer, *numbers, weight=asked.weighs.bytes)
    error = _OF_OPS.get(answer)
    return error and error("This request" if asked.seq is None else f"seq_id {asked.seq}")


def _too_heavy(answer: str, present: int, most: int, *, weight: int) -> Exception:
    if answer == "RUN_BYTES" and weight > most:
        return RunTooLarge(
            f"A run of this rank holds {weight} bytes, and all runs of a tenant may hold {most}; "
            "the operator can raise run_bytes of COTRAIN_QUOTAS."
        )
    asked = f"the runs of this tenant hold {present} bytes, and this one would hold {weight}"
    if answer == "RUN_BYTES":
        return RunBytesQuotaReached(
            f"Quota run_bytes reached: {asked}; they may hold {most}. Unload some that are done with."
        )
    return RunBytesQuotaReached(
        f"The disk has too little left for another run: {asked}, and {most} are left for all tenants. "
        "Unload some that are done with."
    )
