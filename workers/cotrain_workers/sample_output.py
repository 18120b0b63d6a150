"""Encoder of the output of a sample request, as the wire has it."""

import numpy as np

from cotrain.wire.proto import wire_pb2
from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput, TopK


def encode_sample_output(output: SampleOutput, policy_run: str | None = None, policy_step: int | None = None) -> bytes:
    """Return an output as the wire's SampleResponse. Weights of `policy_run` at `policy_step` sampled all its tokens."""
    response = wire_pb2.SampleResponse(prompt_cache_hit_tokens=output.cached_prompt_tokens)
    for sequence in output.sequences:
        response.sequences.append(_sequence(sequence))
        response.sequences[-1].policy_spans.add(end=len(sequence.tokens), training_run_id=policy_run, step=policy_step)
    if output.prompt_logprobs is not None:
        response.prompt_logprobs = np.ascontiguousarray(output.prompt_logprobs, "<f4").tobytes()
    if output.topk_prompt is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(output.topk_prompt))
    if output.target_prompt_logprobs is not None:
        # The wire has 0 for skipped targets.
        targets = np.nan_to_num(np.ascontiguousarray(output.target_prompt_logprobs, "<f4"))
        response.target_prompt_logprobs.dtype = wire_pb2.DTYPE_FLOAT32
        response.target_prompt_logprobs.dense = targets.tobytes()
        response.target_prompt_logprobs.shape.extend(targets.shape)
    if output.prompt_routed_experts is not None:
        response.prompt_routed_experts.CopyFrom(_experts(output.prompt_routed_experts))
    return response.SerializeToString(deterministic=True)


def _sequence(sequence: SampledSequence) -> wire_pb2.SampledSequence:
    return wire_pb2.SampledSequence(
        stop_reason=(wire_pb2.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire_pb2.STOP_REASON_LENGTH),
        tokens=np.ascontiguousarray(sequence.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _topk(sequence.topk),
        routed_experts=(None if sequence.routed_experts is None else _experts(sequence.routed_experts)),
    )


def _experts(chosen: np.ndarray) -> wire_pb2.Tensor:
    is_small = chosen.max(initial=0) <= np.iinfo(np.int8).max
    return wire_pb2.Tensor(
        dense=np.ascontiguousarray(chosen, "<i1" if is_small else "<i2").tobytes(),
        dtype=wire_pb2.DTYPE_INT8 if is_small else wire_pb2.DTYPE_INT16,
        shape=chosen.shape,
    )


def _topk(topk: TopK) -> wire_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire_pb2.TopkLogprobs(
        token_ids=np.ascontiguousarray(topk.token_ids, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(topk.logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )
