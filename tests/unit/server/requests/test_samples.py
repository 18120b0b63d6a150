"""Conversion of the bytes of an asample request to the body that the store accepts."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from cotrain_server.errors import Invalid
from cotrain_server.requests.images import insert_images
from cotrain_server.requests.samples import read_sample
from cotrain_store.bodies.images import BodyImage
from cotrain_store.bodies.sample_body import SampleBody, decode_sample, encode_sample
from tests.support.http_api import POOL, sample_body
from tests.support.pictures import RULES, picture

SAMPLER = "s:sample:0"


def read(**changes: Any) -> SampleBody:
    return read_sample(json.dumps(sample_body(SAMPLER, 0, **changes)).encode()).body


def refusal(**changes: Any) -> str:
    with pytest.raises(Invalid) as refused:
        read(**changes)
    return str(refused.value)


def targets(**tensor: Any) -> Any:
    return read(target_prompt_logprobs={"dtype": "int64", **tensor}).target_prompt_logprobs


def test_a_sample_has_its_sampler_and_its_number() -> None:
    clone = 179_788_117 * 10**9 + 3
    sample = read_sample(json.dumps(sample_body(SAMPLER, clone)).encode())
    assert (sample.sampler, sample.seq) == (SAMPLER, clone)


def test_omitted_fields_have_the_defaults_of_the_hosted_service() -> None:
    assert read(sampling_params={}) == SampleBody(
        prompt=(1, 2, 3),
        num_samples=1,
        max_tokens=None,
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        seed=None,
        stop=None,
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_sample_logprobs=0,
        prompt_logprobs_last_n=None,
        target_prompt_logprobs=None,
        stream=False,
    )


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
    assert message in refusal(target_prompt_logprobs=tensor)


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
    assert refusal(**changes).startswith(message)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"prompt": 1}', b"\xff"])
def test_a_body_that_is_not_a_sample_is_refused(content: bytes) -> None:
    with pytest.raises(Invalid):
        read_sample(content)


def test_a_number_that_is_not_valid_json_is_refused() -> None:
    content = json.dumps(sample_body(SAMPLER, 0, sampling_params={"temperature": float("nan")}))
    with pytest.raises(Invalid):
        read_sample(content.encode())
