from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.bodies.import_body import PeftAdapter, PeftModule, decode_import, encode_import
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.runs import LoraSpec

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
