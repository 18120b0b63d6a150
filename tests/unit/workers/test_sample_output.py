"""Results of sample requests have the requested fields, with their shapes and bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from cotrain import RoutedExperts
from cotrain.wire.codec import decode_sample_response
from cotrain.wire.proto import wire_pb2
from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput, TopK
from cotrain_workers.sample_output import encode_sample_output

Output = partial(
    SampleOutput, prompt_logprobs=None, topk_prompt=None, target_prompt_logprobs=None, cached_prompt_tokens=0
)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_result_has_only_the_requested_fields() -> None:
    empty = SampledSequence(np.zeros(0, np.int32), floats(), "length", None)
    some = SampledSequence(np.array([5, 6], np.int32), floats(-0.5, -1.5), "stop", None)
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
        sequences=(SampledSequence(np.array([1], np.int32), floats(-1), "stop", topk),),
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
    sampled = SampledSequence(np.array([1], np.int32), floats(-1), "stop", None, routed_experts=many[:0])
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
