"""Conversion of a claimed sample request for the decoder, and of its output to a result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cotrain.wire.codec import decode_sample_response
from cotrain.wire.proto import wire_pb2
from cotrain.wire.sampling import PolicySpan
from cotrain_store.messages.ids import RequestId, SamplerId, TenantId, WeightsRef
from cotrain_store.messages.ops import ResultKind
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput
from cotrain_workers.engine.spec import seed_of
from cotrain_workers.sampling.codec import sample_request, sample_result
from tests.support.samples import BODY

REQUEST = RequestId("s:sample:0:1")
CLAIMED = ClaimedSample(
    REQUEST, TenantId("t"), SamplerId("s:sample:0"), None, BODY, accepted_at=0.0, starts=0, deaths=0
)
EOS = (7, 9)


def test_every_field_is_passed_to_the_decoder() -> None:
    body = replace(
        BODY, num_samples=3, max_tokens=None, temperature=0.5, top_k=4, top_p=0.9, seed=11,
        prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1,
        prompt_logprobs_last_n=2, target_prompt_logprobs=((1, -1), (2, 3)),
    )  # fmt: skip
    made = sample_request(replace(CLAIMED, weights=WeightsRef("r:1")), body, EOS)
    assert (made.id, made.tenant, made.weights) == (REQUEST, "t", "r:1")
    assert (made.num_samples, made.max_tokens) == (3, None)
    assert (made.temperature, made.top_k, made.top_p, made.seed) == (0.5, 4, 0.9, 11)
    assert (made.prompt_logprobs, made.prompt_logprobs_last_n) == (True, 2)
    assert (made.topk_prompt_logprobs, made.topk_sample_logprobs) == (2, 1)
    assert made.prompt.tolist() == list(BODY.prompt)
    assert made.prompt.dtype == np.int64
    assert made.target_prompt_logprobs is not None
    assert made.target_prompt_logprobs.tolist() == [[1, -1], [2, 3]]


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [(None, [7, 9], ()), ((), [], ()), ((3, 4), [3, 4, 7, 9], ()), (("a", "bc"), [7, 9], ("a", "bc"))],
)
def test_an_empty_stop_list_is_the_only_one_without_end_of_sequence(
    stop: tuple[str, ...] | tuple[int, ...] | None, tokens: list[int], strings: tuple[str, ...]
) -> None:
    made = sample_request(CLAIMED, replace(BODY, stop=stop), EOS)
    assert (sorted(made.stop_tokens), made.stop_strings) == (tokens, strings)


def test_a_default_seed_depends_only_on_the_request() -> None:
    unseeded = replace(BODY, seed=None)
    made = sample_request(CLAIMED, unseeded, EOS)
    assert made.seed == seed_of(REQUEST) == 8131979140669290372
    other = replace(CLAIMED, request=RequestId("s:sample:0:2"))
    assert made.seed != sample_request(other, unseeded, EOS).seed
    assert sample_request(CLAIMED, replace(BODY, seed=0), EOS).seed == 0


@pytest.mark.parametrize(("prompt", "targets"), [((1,), ()), ((1, 2), ((),))])
def test_targets_of_a_prompt_without_scored_tokens_are_a_matrix(
    prompt: tuple[int, ...], targets: tuple[tuple[int, ...], ...]
) -> None:
    body = replace(BODY, prompt=prompt, target_prompt_logprobs=targets)
    made = sample_request(CLAIMED, body, EOS)
    assert made.target_prompt_logprobs is not None
    assert made.target_prompt_logprobs.shape == (len(prompt) - 1, 0)


def test_an_output_is_encoded_in_the_wire_format() -> None:
    sequence = SampledSequence(np.array([4, 7], np.int32), np.array([-1, -2], np.float32), "stop", None)
    claimed = replace(CLAIMED, weights=WeightsRef("r:1"))
    request = sample_request(claimed, replace(BODY, policy_step=5), EOS)
    output = SampleOutput([sequence], None, None, None, cached_prompt_tokens=2)
    result = sample_result(request, output)
    assert result.kind is ResultKind.SAMPLE
    response = wire_pb2.SampleResponse.FromString(result.payload)
    assert response.prompt_cache_hit_tokens == 2
    assert np.frombuffer(response.sequences[0].tokens, "<i4").tolist() == [4, 7]
    (span,) = response.sequences[0].policy_spans
    assert (span.start, span.end, span.training_run_id, span.step) == (0, 2, "r", 5)
    (base,) = decode_sample_response(
        sample_result(replace(request, weights=None, policy_step=None), output).payload
    ).sequences
    assert base.policy_spans == [PolicySpan(start=0, end=2)]
    assert base.policy_steps == [-1, -1]
