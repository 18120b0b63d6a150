"""Bodies and results of sample requests: unchanged by encoding and decoding, and safe with malicious bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain import RoutedExperts
from cotrain.wire.codec import decode_sample_response
from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies.sample_body import SampleBody, decode_sample, encode_sample, encode_sample_output
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
    target_prompt_logprobs=st.none() | targets,
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


@dataclass(frozen=True)
class TopK:
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sampled:
    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True)
class Output:
    sequences: tuple[Sampled, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt: TopK | None = None
    target_prompt_logprobs: np.ndarray | None = None
    cached_prompt_tokens: int = 0
    prompt_routed_experts: np.ndarray | None = None


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_result_has_only_the_requested_fields() -> None:
    empty = Sampled(np.zeros(0, np.int32), floats(), "length")
    some = Sampled(np.array([5, 6], np.int32), floats(-0.5, -1.5), "stop")
    message = encode_sample_output(Output((empty, some)))
    response = wire_pb2.SampleResponse.FromString(message)
    assert [sequence.stop_reason for sequence in response.sequences] == [
        wire_pb2.STOP_REASON_LENGTH,
        wire_pb2.STOP_REASON_STOP,
    ]
    assert np.frombuffer(response.sequences[1].tokens, "<i4").tolist() == [5, 6]
    assert np.frombuffer(response.sequences[1].logprobs, "<f4").tolist() == [-0.5, -1.5]
    assert response.sequences[0].tokens == b""
    assert response.sequences[0].HasField("logprobs")  # none is not the same as unknown
    asked = ("prompt_routed_experts", "prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs")
    assert not any(response.HasField(name) for name in asked)


def test_prompt_results_keep_their_shape_and_their_bits() -> None:
    topk = TopK(np.array([[0, 0], [7, 3]], np.int64), floats(-99999.0, -99999.0, -0.25, -2).reshape(2, 2))
    output = Output(
        sequences=(Sampled(np.array([1], np.int32), floats(-1), "stop", topk),),
        prompt_logprobs=floats(np.nan, -0.125),
        topk_prompt=topk,
        target_prompt_logprobs=floats(-1, np.nan, -3).reshape(1, 3),
        cached_prompt_tokens=64,
    )
    response = wire_pb2.SampleResponse.FromString(encode_sample_output(output))
    assert response.prompt_cache_hit_tokens == 64
    np.testing.assert_array_equal(np.frombuffer(response.prompt_logprobs, "<f4"), [np.nan, np.float32(-0.125)])
    for found in (response.topk_prompt_logprobs, response.sequences[0].topk_sampled_logprobs):
        assert (found.length, found.k) == (2, 2)
        assert np.frombuffer(found.token_ids, "<i4").tolist() == [0, 0, 7, 3]
        assert np.frombuffer(found.logprobs, "<f4").tolist() == [-99999, -99999, -0.25, -2]
    targets = response.target_prompt_logprobs
    assert (list(targets.shape), targets.dtype) == ([1, 3], wire_pb2.DTYPE_FLOAT32)
    np.testing.assert_array_equal(np.frombuffer(targets.dense, "<f4"), [-1, 0, -3])


def test_experts_have_the_smallest_type_that_holds_them() -> None:
    few = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    many = few + np.int16(120)
    sampled = Sampled(np.array([1], np.int32), floats(-1), "stop", routed_experts=many[:0])
    output = Output((sampled, replace(sampled, routed_experts=many)), prompt_routed_experts=few)

    found = decode_sample_response(encode_sample_output(output))

    assert found.prompt_routed_experts == RoutedExperts.of(few)
    assert found.prompt_routed_experts is not None
    assert (found.prompt_routed_experts.dtype, len(found.prompt_routed_experts.data)) == ("int8", 12)
    none, some = (each.routed_experts for each in found.sequences)
    assert none is not None
    assert none.shape == (0, 2, 2)
    assert some is not None
    assert some.dtype == "int16"
    np.testing.assert_array_equal(some.to_numpy(), many)
