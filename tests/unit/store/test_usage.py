from __future__ import annotations

from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.ops import SampleUsage
from cotrain_store.usage import sampling_amounts, usage_hour

USED = SampleUsage(prompt_tokens=5, cached_tokens=0, sampled_tokens=2)


def test_an_hour_is_named_by_its_start() -> None:
    assert [usage_hour(at_s) for at_s in (7200.0, 10_799.9, 10_800.0)] == [7200, 7200, 10_800]


def test_an_amount_of_zero_is_not_written() -> None:
    assert sampling_amounts(RequestId("s:sample:0:1"), USED, "m") == {
        "prefill_tokens|m|s|s:sample:0": 5,
        "sampled_tokens|m|s|s:sample:0": 2,
    }
    assert sampling_amounts(RequestId("s:sample:0:1"), None, "m") == {}
