from __future__ import annotations

import pytest

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.monitoring.traceparent import if_sampled, read_traceparent, trace_id

SAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_a_traceparent_is_parsed_with_its_sampled_flag() -> None:
    assert read_traceparent(SAMPLED) == (int("ab" * 16, 16), int("cd" * 8, 16), 1)
    assert trace_id(SAMPLED) == "ab" * 16
    assert if_sampled(SAMPLED) == SAMPLED
    assert if_sampled(SAMPLED[:-1] + "0") == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "00", SAMPLED.upper(), SAMPLED + "0", "01" + SAMPLED[2:], f"{SAMPLED}\n",
        f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_an_invalid_traceparent_has_no_span(text: str) -> None:
    assert read_traceparent(text) is None
    assert if_sampled(text) == ""


@pytest.mark.parametrize("trace", ["", SAMPLED])
@pytest.mark.parametrize("ref", ["inline", "spool:api-1.2:5:6"])
def test_the_record_of_an_op_has_its_trace_only_if_there_is_one(trace: str, ref: str) -> None:
    op = QueuedOp(RunId("r"), 3, OpKind.FORWARD, 7, ref, 9, 1795393741.25, trace)
    envelope = op.envelope()
    assert QueuedOp.parse(op.run, op.seq, envelope) == op
    assert envelope == f"forward|7|9|1795393741.25{trace and ';' + trace}|{ref}"
    assert len(envelope) - len(QueuedOp(*list(vars(op).values())[:7]).envelope()) in (0, 56)
