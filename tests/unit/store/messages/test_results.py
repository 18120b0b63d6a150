from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.results import Result, ResultKind


@given(st.builds(Result, st.sampled_from(ResultKind), st.binary(max_size=50)))
def test_a_result_is_read_back(result: Result) -> None:
    assert Result.decode(result.encode()) == result


def test_a_failure_has_a_category() -> None:
    failure = Result.failed("The rank is ü.", "user")
    assert failure.json() == {"error": "The rank is ü.", "category": "user"}
    assert failure.kind is ResultKind.FAILURE
