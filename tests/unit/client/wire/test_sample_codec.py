"""Results of sampling, compared with the official SDK's own decoder."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import response_conv

from cotrain.errors import MalformedMessage
from cotrain.wire.codec import decode_sample_response, sample_response_to_json
from cotrain.wire.proto import wire_pb2 as wire

scores = st.lists(st.floats(-100, 0, width=32), min_size=1, max_size=5)


def topk(rows: int, k: int, empty: int = 0) -> wire.TopkLogprobs:
    """Return matrices whose first `empty` rows are empty."""
    ids = np.arange(1, rows * k + 1, dtype=np.int32).reshape(rows, k)
    logprobs = -ids.astype(np.float32)
    ids[:empty], logprobs[:empty] = 0, -99999.0
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=rows)


def sequence(logprobs: list[float], **fields: Any) -> wire.SampledSequence:
    return wire.SampledSequence(
        tokens=np.arange(len(logprobs), dtype=np.int32).tobytes(),
        logprobs=np.array(logprobs, dtype=np.float32).tobytes(),
        **fields,
    )


@given(st.lists(scores, max_size=3), st.none() | scores, st.integers(0, 2), st.integers(1, 3))
def test_a_result_decodes_as_the_official_sdk_decodes_it(
    rows: list[list[float]], prompt: list[float] | None, empty: int, k: int
) -> None:
    message = wire.SampleResponse(prompt_cache_hit_tokens=3)
    for index, logprobs in enumerate(rows):
        message.sequences.append(
            sequence(
                logprobs, stop_reason=wire.StopReason.Name(index % 2), topk_sampled_logprobs=topk(len(logprobs), k)
            )
        )
    if prompt is not None:
        message.prompt_logprobs = np.array([np.nan, *prompt], dtype=np.float32).tobytes()
        message.topk_prompt_logprobs.CopyFrom(topk(4, k, empty))
    ours = decode_sample_response(message.SerializeToString())
    theirs = response_conv.deserialize_sample_response(message.SerializeToString())
    assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert ours.topk_prompt_logprobs == theirs.topk_prompt_logprobs
    assert ours.prompt_cache_hit_tokens == theirs.prompt_cache_hit_tokens
    for our, their in zip(ours.sequences, theirs.sequences, strict=True):
        assert (our.stop_reason, our.tokens) == (their.stop_reason, their.tokens)
        assert (our.logprobs, our.topk_logprobs) == (their.logprobs, their.topk_logprobs)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_topk_scores_decode_as_the_official_sdk_decodes_them(is_sparse: bool) -> None:
    tensor = wire.Tensor(dtype=wire.DTYPE_FLOAT32, shape=[2, 2])
    if is_sparse:
        tensor.sparse_csr.values = np.array([-1.5], dtype=np.float32).tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 0, 1], dtype=np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array([1], dtype=np.int64).tobytes()
    else:
        tensor.dense = np.array([0, 0, 0, -1.5], dtype=np.float32).tobytes()
    payload = wire.SampleResponse(target_prompt_logprobs=tensor).SerializeToString()
    ours = decode_sample_response(payload).target_prompt_logprobs
    theirs = response_conv.deserialize_sample_response(payload).target_prompt_logprobs
    assert ours is not None
    assert theirs is not None
    assert ours.tolist() == [[0, 0], [0, -1.5]] == theirs.to_numpy().tolist()
    assert ours.is_sparse == is_sparse


def test_an_empty_sequence_has_logprobs_of_length_0() -> None:
    message = wire.SampleResponse(sequences=[sequence([])])
    (decoded,) = decode_sample_response(message.SerializeToString()).sequences
    assert (decoded.tokens, decoded.logprobs) == ([], [])


def test_a_result_as_json_is_readable_by_the_older_sdk() -> None:
    message = wire.SampleResponse(
        sequences=[sequence([-0.5], stop_reason=wire.STOP_REASON_LENGTH)],
        prompt_logprobs=np.array([np.nan, -1], dtype=np.float32).tobytes(),
        topk_prompt_logprobs=topk(2, 1, empty=1),
    )
    assert json.loads(sample_response_to_json(message.SerializeToString())) == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [0], "logprobs": [-0.5]}],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [[2, -2.0]]],
        "prompt_cache_hit_tokens": 0,
    }


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff\xff\xff", "not a SampleResponse"),
        (wire.SampleResponse(prompt_logprobs=b"123"), "whole number of elements"),
        (wire.SampleResponse(topk_prompt_logprobs=wire.TopkLogprobs(k=2, length=2)), "is cut"),
        (wire.SampleResponse(target_prompt_logprobs=wire.Tensor()), "element type"),
        (wire.SampleResponse(target_prompt_logprobs=wire.Tensor(dtype=wire.DTYPE_INT64, shape=[3])), "fill its shape"),
    ],
)
def test_bytes_that_are_not_a_result_are_refused(payload: Any, why: str) -> None:
    bytes_ = payload if isinstance(payload, bytes) else payload.SerializeToString()
    with pytest.raises(MalformedMessage, match=why):
        decode_sample_response(bytes_)
