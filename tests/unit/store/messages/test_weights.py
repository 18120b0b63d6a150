from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.ids import (
    WeightsRef,
)
from cotrain_store.messages.weights import external_folder

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)


@given(names, names)
def test_weights_of_their_own_have_a_folder_of_their_own(one: str, other: str) -> None:
    folders = external_folder(WeightsRef(one)), external_folder(WeightsRef(other))
    assert (folders[0] == folders[1]) == (one == other)
    assert "/" not in folders[0]
