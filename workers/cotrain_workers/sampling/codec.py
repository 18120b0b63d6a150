"""Conversion of claimed sample requests to decoder requests, and of decoder outputs to results."""

from collections.abc import Iterable

import numpy as np

from cotrain_store.bodies.sample_body import SampleBody, encode_sample_output
from cotrain_store.messages.ids import RequestId, run_of
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.ops import Image
from cotrain_workers.engine.spec import seed_of


def sample_request(claimed: ClaimedSample, body: SampleBody, end_of_sequence: Iterable[int]) -> SampleRequest:
    """Return the decoder's request, with defaults for missing fields.

    A missing seed is derived from the request's id, so that a repeated request yields the same tokens.
    """
    tokens, strings = _stops(body.stop, end_of_sequence)
    return SampleRequest(
        id=claimed.request,
        weights=claimed.weights,
        prompt=np.array(body.prompt, np.int64),
        num_samples=body.num_samples,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed_of(claimed.request) if body.seed is None else body.seed,
        stop_tokens=tokens,
        stop_strings=strings,
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        target_prompt_logprobs=_targets(body),
        grammar=body.grammar,
        images=[Image(**vars(each)) for each in body.images],
        return_routed_experts=body.return_routed_experts,
        tenant=claimed.tenant,
        tenant_weight=claimed.tenant_weight,
        policy_step=body.policy_step,
    )


def sample_result(request: SampleRequest, output: SampleOutput) -> Result:
    """Return the encoded result of a sample request."""
    run = run_of(RequestId(request.weights)) if request.weights else None
    return Result(ResultKind.SAMPLE, encode_sample_output(output, run, request.policy_step))


def _targets(body: SampleBody) -> np.ndarray | None:
    rows = body.target_prompt_logprobs
    if rows is None:
        return None
    return np.array(rows, np.int64).reshape(len(rows), len(rows[0]) if rows else 0)


def _stops(
    stop: tuple[str, ...] | tuple[int, ...] | None, end_of_sequence: Iterable[int]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """None stops at the model's own end of sequence, nothing stops at nothing, else both stop."""
    if stop == ():
        return frozenset(), ()
    given = stop or ()
    tokens = frozenset(one for one in given if isinstance(one, int))
    return tokens | frozenset(end_of_sequence), tuple(one for one in given if isinstance(one, str))
