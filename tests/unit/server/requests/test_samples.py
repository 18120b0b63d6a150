"""Conversion of an asample request to the body that the store accepts, and the refusals of its validation."""

import json
import sys
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_server.errors import Invalid
from cotrain_server.requests.images import insert_images
from cotrain_server.requests.samples import MAX_STOPS, check_sample, read_sample
from cotrain_store.bodies.images import BodyImage
from cotrain_store.bodies.sample_body import SampleBody, TargetTokens, decode_sample, encode_sample
from cotrain_store.messages.runs import PoolRecord
from tests.support.http_api import POOL, sample_body
from tests.support.pictures import RULES, picture

SAMPLER = "s:sample:0"
DEFAULTS = SampleBody(
    prompt=(1, 2, 3),
    num_samples=1,
    max_tokens=None,
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    seed=None,
    stop=None,
)


def read(**changes: Any) -> SampleBody:
    return read_sample(json.dumps(sample_body(SAMPLER, 0, **changes)).encode()).body


def read_refusal(**changes: Any) -> str:
    with pytest.raises(Invalid) as refused:
        read(**changes)
    return str(refused.value)


def targets(**tensor: Any) -> Any:
    found = read(target_prompt_logprobs={"dtype": "int64", **tensor}).target_prompt_logprobs
    assert found is not None
    return tuple(map(tuple, found.matrix.tolist()))


def test_a_sample_has_its_sampler_and_its_number() -> None:
    clone = 179_788_117 * 10**9 + 3
    sample = read_sample(json.dumps(sample_body(SAMPLER, clone)).encode())
    assert (sample.sampler, sample.seq) == (SAMPLER, clone)


def test_omitted_fields_have_the_defaults_of_the_hosted_service() -> None:
    assert read(sampling_params={}) == DEFAULTS


def test_an_image_takes_its_place_in_the_prompt() -> None:
    data, pool = picture(0, 24, 16), replace(POOL, images=RULES)
    image = {"type": "image", "data": b64encode(data).decode(), "format": "png", "expected_tokens": 6}
    text = [{"type": "encoded_text", "tokens": tokens} for tokens in ([7], [8, 9])]
    body = json.dumps(sample_body(SAMPLER, 0, prompt={"chunks": [image, text[0], image, text[1]]}))
    sample = read_sample(body.encode())
    placed = insert_images(sample.body, sample.images, pool)
    assert placed.prompt == (*[3] * 6, 7, *[3] * 6, 8, 9)
    assert placed.images == (BodyImage(0, 2, 3, data), BodyImage(7, 2, 3, data))
    assert decode_sample(encode_sample(placed)) == placed

    wrong = replace(sample.images[1], expected_tokens=5)
    for images, its_pool, message in (
        ((sample.images[0], wrong), pool, r"prompt.chunks\[2\] has expected_tokens=5, but 6 tokens"),
        (sample.images, POOL, "prompt has an image, but tiny/model reads text only here"),
        (sample.images, replace(pool, sampler="vllm"), "samples come from a vLLM server here"),
    ):
        with pytest.raises(Invalid, match=message):
            insert_images(sample.body, images, its_pool)


def test_the_chunks_of_a_prompt_are_joined() -> None:
    chunks = [{"type": "encoded_text", "tokens": tokens} for tokens in ([7], [], [8, 9])]
    assert read(prompt={"chunks": chunks}).prompt == (7, 8, 9)


@pytest.mark.parametrize(
    ("stop", "stops"), [(None, None), ("\n", ("\n",)), (["a", "b"], ("a", "b")), ([1, 2], (1, 2)), ([], ())]
)
def test_every_form_of_stop_is_read(stop: Any, stops: Any) -> None:
    assert read(sampling_params={"stop": stop}).stop == stops


def test_targets_are_read_row_by_row() -> None:
    assert targets(shape=[2, 3], data=[1, 2, 3, 4, -1, 6]) == ((1, 2, 3), (4, -1, 6))


def test_targets_missing_from_a_sparse_tensor_request_nothing() -> None:
    sparse = {"sparse_crow_indices": [0, 1, 3], "sparse_col_indices": [1, 2, 0]}
    assert targets(shape=[2, 3], data=[5, 6, 0], **sparse) == ((-1, 5, -1), (0, -1, 6))


def test_a_million_targets_of_a_small_request_are_read_checked_and_encoded_without_a_loop() -> None:
    """300 bytes had stopped the event loop for 2.8 s."""
    shape = {"shape": [2, 2**19], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [7, 2**19 - 1]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    tensor = {"dtype": "int64", "data": [5, 6], **shape}
    content = json.dumps(sample_body(SAMPLER, 0, prompt=prompt, target_prompt_logprobs=tensor)).encode()
    lines = 0

    def trace(_: Any, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        sample = read_sample(content).body
        check_sample(sample, POOL)
        encoded = encode_sample(sample)
    finally:
        sys.settrace(before)

    assert lines < 10_000
    found = decode_sample(encoded).target_prompt_logprobs
    assert found is not None
    assert np.argwhere(found.matrix != -1).tolist() == [[0, 7], [1, 2**19 - 1]]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dtype": "float32", "data": [1.0], "shape": [1, 1]}, "must be int64 of shape"),
        ({"dtype": "int64", "data": [1, 2]}, "must be int64 of shape"),
        ({"dtype": "int64", "data": [], "shape": [2, 0]}, "must be int64 of shape"),
        (
            {
                "dtype": "int64",
                "data": [],
                "shape": [1, 2**30],
                "sparse_crow_indices": [0, 0],
                "sparse_col_indices": [],
            },
            "may have at most 1048576 cells.",
        ),
    ],
)
def test_invalid_targets_are_refused(tensor: dict[str, Any], message: str) -> None:
    assert message in read_refusal(target_prompt_logprobs=tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}},
            "prompt: chunks of type dmel cannot be read here; send text tokens or images.",
        ),
        (
            {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://a"}]}},
            "prompt: chunks of type image_asset_pointer cannot be read here; send the bytes of the image as an image chunk.",
        ),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k is not supported here."),
        ({"record_stability_info": True}, "record_stability_info is not supported here: "),
        ({"seq_id": None}, "sampling_session_id and seq_id are required"),
        ({"sampling_session_id": None, "base_model": "tiny/model"}, "sampling_session_id and seq_id are required"),
        ({"num_samples": 0}, "num_samples: "),
        ({"num_samples": 1.5}, "num_samples: "),
        ({"seq_id": 2**63}, "seq_id: "),
        ({"seq_id": -1}, "seq_id: "),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature: "),
        ({"sampling_params": {"max_tokens": 1.5}}, "sampling_params.max_tokens: "),
        ({"sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop"),
        ({"sampling_params": {"seed": 2**64}}, "sampling_params.seed: "),
    ],
)
def test_an_unsupported_value_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    assert read_refusal(**changes).startswith(message)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"prompt": 1}', b"\xff"])
def test_a_body_that_is_not_a_sample_is_refused(content: bytes) -> None:
    with pytest.raises(Invalid):
        read_sample(content)


def test_a_number_that_is_not_valid_json_is_refused() -> None:
    content = json.dumps(sample_body(SAMPLER, 0, sampling_params={"temperature": float("nan")}))
    with pytest.raises(Invalid):
        read_sample(content.encode())


LAST = POOL.vocab_size - 1


def body(**changes: Any) -> SampleBody:
    return replace(DEFAULTS, **changes)


def refusal(pool: PoolRecord = POOL, **changes: Any) -> str:
    with pytest.raises(Invalid) as refused:
        check_sample(body(**changes), pool)
    return str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": (LAST,) * POOL.max_sequence_tokens},
        {"num_samples": 1_024},
        {"max_tokens": 0},
        {"max_tokens": 2**31 - 1},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": POOL.vocab_size},
        {"top_p": 1e-9},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": ()},
        {"stop": (0, LAST)},
        {"stop": ("\n", "é" * 1_024)},
        {"topk_prompt_logprobs": 128, "topk_sample_logprobs": 128},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"target_prompt_logprobs": TargetTokens.of(((-1, 0), (LAST, -1)))},
        {"prompt": (5,), "target_prompt_logprobs": TargetTokens.of(())},
    ],
)
def test_a_request_within_the_limits_is_accepted(changes: dict[str, Any]) -> None:
    check_sample(body(**changes), POOL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt has 0 tokens; tiny/model samples from prompts of 1 to 64."),
        ({"prompt": (1,) * 65}, "prompt has 65 tokens; tiny/model samples from prompts of 1 to 64."),
        ({"prompt": (1, 512)}, "prompt: token id 512 at position 1 is outside the vocabulary (0..511)."),
        ({"prompt": (-1, 2)}, "prompt: token id -1 at position 0 is outside the vocabulary (0..511)."),
        ({"num_samples": 0}, "num_samples must be between 1 and 1024."),
        ({"num_samples": 1_025}, "num_samples must be between 1 and 1024."),
        ({"max_tokens": -1}, "max_tokens must be between 0 and 2147483647."),
        ({"temperature": -0.1}, "temperature must be a finite number, 0 or more."),
        ({"temperature": float("inf")}, "temperature must be a finite number, 0 or more."),
        ({"temperature": float("nan")}, "temperature must be a finite number, 0 or more."),
        ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1."),
        ({"top_p": 1.1}, "top_p must be greater than 0 and at most 1."),
        ({"top_p": float("nan")}, "top_p must be greater than 0 and at most 1."),
        ({"top_k": 0}, "top_k must be between 1 and 512, the size of the vocabulary, or -1 for no limit."),
        ({"top_k": 513}, "top_k must be between 1 and 512, the size of the vocabulary, or -1 for no limit."),
        ({"seed": 2**64}, "seed must be between -9223372036854775808 and 18446744073709551615."),
        ({"stop": (1,) * 65}, "stop has 65 entries; the limit is 64."),
        ({"stop": ("a", "")}, "stop: each string must have 1 to 1024 characters."),
        ({"stop": ("a" * 1_025,)}, "stop: each string must have 1 to 1024 characters."),
        ({"stop": ("a" * 1_000,) * 5}, "stop: the strings have 5000 characters together. The limit is 4096."),
        ({"stop": (512,)}, "stop: token id 512 at position 0 is outside the vocabulary (0..511)."),
        ({"topk_prompt_logprobs": 129}, "topk_prompt_logprobs must be between 0 and 128."),
        ({"topk_sample_logprobs": 129}, "topk_sample_logprobs must be between 0 and 128."),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n needs prompt_logprobs."),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
            "prompt_logprobs_last_n must be between 1 and 2, one less than the prompt has tokens.",
        ),
        (
            {"target_prompt_logprobs": TargetTokens.of(((1,),))},
            "target_prompt_logprobs has 1 rows; the prompt has 2 tokens after its first.",
        ),
        (
            {"target_prompt_logprobs": TargetTokens.of(((1, -1), (-2, 1)))},
            "target_prompt_logprobs[1, 0] is -2, which is outside the vocabulary (0..511) and not -1.",
        ),
    ],
)
def test_each_refusal_names_the_field_and_its_limit(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


def test_topk_is_limited_to_the_vocabulary() -> None:
    small = replace(POOL, vocab_size=10)
    assert refusal(small, topk_sample_logprobs=11) == ("topk_sample_logprobs must be between 0 and 10.")


def test_a_base_model_without_sampling_is_refused() -> None:
    assert refusal(replace(POOL, max_sequence_tokens=0)) == ("tiny/model cannot be sampled from here.")


def test_without_a_tokenizer_only_token_ids_can_be_stops() -> None:
    bare = replace(POOL, tokenizer="")
    assert refusal(bare, stop=("\n",)).startswith("stop: tiny/model has no tokenizer here")
    check_sample(body(stop=(7,)), bare)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=80),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=MAX_STOPS + 2),
)
def test_no_token_outside_the_vocabulary_is_accepted(prompt: list[int], stop: list[int]) -> None:
    try:
        check_sample(body(prompt=tuple(prompt), stop=tuple(stop)), POOL)
    except Invalid:
        return
    assert all(0 <= token < POOL.vocab_size for token in (*prompt, *stop))
    assert 1 <= len(prompt) <= POOL.max_sequence_tokens


def test_the_total_number_of_logprobs_of_a_request_is_limited() -> None:
    wide = replace(POOL, max_sequence_tokens=2**15)
    most = {"num_samples": 1_024, "topk_sample_logprobs": 128, "max_tokens": 128}
    check_sample(body(**most), wide)
    for more in ({"max_tokens": 129}, {"max_tokens": None}):
        message = refusal(wide, **{**most, **more})
        assert message.startswith("topk_sample_logprobs: 1024 samples of up to ")
        assert "at most 16777216" in message
    check_sample(body(num_samples=1_024), wide)


def test_experts_are_returned_by_the_engine_of_a_mixture() -> None:
    mixture = replace(POOL, expert_choices=(48, 8, 128), max_sequence_tokens=2**15)
    most = {"return_routed_experts": True, "num_samples": 21, "max_tokens": 2**15}
    check_sample(body(**most), mixture)
    assert refusal(mixture, **{**most, "num_samples": 22}) == (
        "return_routed_experts: 22 samples of up to 32765 tokens have 276799872 experts. The limit is 268435456. "
        "Ask for fewer samples or a smaller max_tokens."
    )
    assert refusal(POOL, return_routed_experts=True) == (
        "return_routed_experts: tiny/model has no experts to choose from. Leave it out."
    )
    served = replace(mixture, sampler="vllm")
    assert refusal(served, return_routed_experts=True) == (
        "return_routed_experts needs the sampler of the engine, not vLLM."
    )
