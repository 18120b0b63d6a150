"""Bodies of sample requests: unchanged by encoding and decoding, and safe with malicious bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.bodies.sample_body import SampleBody, TargetTokens, decode_sample, encode_sample
from cotrain_store.errors import MalformedBody

tokens = st.integers(0, 2**31 - 1)
targets = st.integers(0, 3).flatmap(
    lambda k: st.lists(st.lists(st.integers(-1, 2**31), min_size=k, max_size=k).map(tuple), max_size=4).map(tuple)
)
bodies = st.builds(
    SampleBody,
    prompt=st.lists(tokens, max_size=50).map(tuple),
    num_samples=st.integers(1, 100),
    max_tokens=st.none() | st.integers(0, 2**31),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 500),
    top_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.none()
    | st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)).map(tuple)
    | st.lists(tokens).map(tuple),
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.integers(0, 20),
    topk_sample_logprobs=st.integers(0, 20),
    prompt_logprobs_last_n=st.none() | st.integers(0, 100),
    target_prompt_logprobs=st.none() | targets.map(TargetTokens.of),
    stream=st.booleans(),
    return_routed_experts=st.booleans(),
)


@given(bodies)
def test_a_body_is_unchanged_by_encoding_and_decoding(body: SampleBody) -> None:
    assert decode_sample(encode_sample(body)) == body


@given(bodies)
def test_fields_of_a_later_version_are_ignored(body: SampleBody) -> None:
    written = encode_sample(body)
    length = int.from_bytes(written[:4], "little")
    text = b'{"a_field_of_tomorrow":[1],' + written[17 : 16 + length]
    longer = len(text).to_bytes(4, "little") + written[4:16] + text + written[16 + length :]
    assert decode_sample(longer) == body


@given(bodies, st.integers(0, 400))
def test_a_truncated_body_is_refused(body: SampleBody, cut: int) -> None:
    written = encode_sample(body)
    if cut < len(written):
        with pytest.raises(MalformedBody):
            decode_sample(written[:cut])


@given(st.binary(max_size=200))
def test_content_that_is_not_a_body_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode_sample(content)
