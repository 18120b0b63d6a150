"""Requests of saves and loads in the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.ids import WeightsRef, encode
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.saves import LoadRequest, LoadSource, SaveRequest, external_folder

names = st.from_regex(r"[A-Za-z0-9:_-]{1,30}", fullmatch=True)
specs = st.builds(LoraSpec, rank=st.integers(1, 256), seed=st.integers(0, 2**31))
saves = st.builds(
    SaveRequest,
    name=st.none() | names,
    kind=st.sampled_from(["weights", "sampler_weights", "external_weights"]),
    overwrite=st.booleans(),
    ttl_seconds=st.none() | st.integers(1, 10**9),
    user_metadata=st.dictionaries(names, names),
    age_recipients=st.lists(names).map(tuple),
    answer=st.dictionaries(names, st.lists(st.floats(-1, 1))),
    last=st.booleans(),
)
sources = st.builds(LoadSource, ref=names.map(WeightsRef), coefficient=st.floats(-2, 2))
loads = st.builds(
    LoadRequest,
    path=names,
    sources=st.lists(sources, min_size=1, max_size=3).map(tuple),
    optimizer=st.booleans(),
    lora=st.none() | specs,
)


@given(saves)
def test_a_save_is_read_back(save: SaveRequest) -> None:
    assert SaveRequest.parse(encode(save).encode()) == save


@given(loads)
def test_a_load_is_read_back(load: LoadRequest) -> None:
    assert LoadRequest.parse(encode(load).encode()) == load


def test_an_omitted_field_of_a_save_has_its_default() -> None:
    assert SaveRequest.parse(b'{"name": "x"}') == SaveRequest(name="x")


@given(names, names)
def test_external_weights_have_their_own_folder(one: str, other: str) -> None:
    folders = external_folder(WeightsRef(one)), external_folder(WeightsRef(other))
    assert (folders[0] == folders[1]) == (one == other)
    assert "/" not in folders[0]
