"""Bodies of saves, loads and imports, as they are read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.bodies.adapter_bodies import (
    LoadRequest,
    LoadSource,
    PeftAdapter,
    PeftModule,
    SaveRequest,
    decode_import,
    encode_import,
)
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import WeightsRef, encode
from cotrain_store.messages.runs import LoraSpec, external_folder

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


NAMES = st.text(max_size=20)
ADAPTERS = st.builds(
    PeftAdapter,
    lora=st.builds(
        LoraSpec,
        rank=st.integers(1, 128),
        seed=st.integers(0, 2**48),
        train_attn=st.booleans(),
        train_mlp=st.booleans(),
        train_unembed=st.booleans(),
    ),
    modules=st.lists(st.builds(PeftModule, NAMES, NAMES, NAMES, st.floats(allow_nan=False)), max_size=4).map(tuple),
    tensors=st.binary(max_size=50),
)


@given(ADAPTERS)
def test_an_adapter_is_unchanged_by_encoding_and_decoding(adapter: PeftAdapter) -> None:
    assert decode_import(encode_import(adapter)) == adapter


@given(ADAPTERS, st.data())
def test_a_truncated_body_is_malformed_or_another_adapter(adapter: PeftAdapter, data: st.DataObject) -> None:
    body = encode_import(adapter)
    length = data.draw(st.integers(0, len(body) - 1)) if len(body) > 1 else 0
    try:
        assert decode_import(body[:length]) != adapter
    except MalformedBody:
        return


@pytest.mark.parametrize(
    "body", [b"", b"CTI", b"CTI2\x02\0\0\0{}", b"CTI1\x02\0\0\0{}", b"CTI1\x02\0\0\0[]", b"CTI1\xff\xff\xff\xff{"]
)
def test_a_body_that_is_not_an_import_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode_import(body)
