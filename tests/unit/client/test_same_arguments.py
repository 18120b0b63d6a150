"""Arguments of our types and of the official SDK's: the same are accepted with the same effect, and
a refusal is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types as official
from transformers import BatchEncoding

from cotrain import types as ours
from cotrain.errors import UnsupportedInput

Made = Callable[[Any], Any]


def tensor_of(name: str, value: Any) -> Made:
    def made(types: Any) -> Any:
        prompt = types.ModelInput.from_ints([1, 2, 3])
        tensor = types.Datum(prompt, {name: value}).loss_fn_inputs[name]
        return tensor.dtype, tensor.shape, tensor.tolist()

    return made


def array_of(**fields: Any) -> Made:
    def made(types: Any) -> Any:
        tensor = types.TensorData(**fields)
        return tensor.dtype, list(tensor.data), tensor.tolist()

    return made


def sampling(**fields: Any) -> Made:
    def made(types: Any) -> Any:
        params = types.SamplingParams(**fields)
        stop = params.stop if isinstance(params.stop, str | None) else list(params.stop)
        return params.max_tokens, params.seed, stop, params.temperature, params.top_k

    return made


def asked(**fields: Any) -> Made:
    def made(types: Any) -> Any:
        request = types.SampleRequest(
            prompt=types.ModelInput.from_ints([1]), sampling_params=types.SamplingParams(), **fields
        )
        return request.num_samples, request.topk_prompt_logprobs, request.prompt_logprobs_last_n

    return made


def tokens(given: Any) -> Made:
    return lambda types: types.ModelInput.from_ints(given).to_ints()


MATRIX = torch.tensor([[0] * 8, [0, 0, 5, 0, 0, 0, 0, 7]])
TAKEN_BY_BOTH: dict[str, Made] = {
    "tokens of NumPy": tokens(list(np.array([1, 2]))),
    "tokens of torch": tokens(list(torch.tensor([1, 2]))),
    "whole floats": tokens([1.0, np.float32(2)]),
    "texts of numbers": tokens(["1", "2"]),
    "a range": tokens(range(3)),
    "booleans": tokens([True, False]),
    "a chunk more": lambda t: t.ModelInput.empty().append(t.EncodedTextChunk(tokens=[1])).length,
    "a token more": lambda t: t.ModelInput.from_ints([1]).append_int(2).to_ints(),
    "a chunk's length": lambda t: t.EncodedTextChunk(tokens=[1, 2]).length,
    "targets of NumPy": tensor_of("target_tokens", list(np.array([1, 2, 3]))),
    "targets of torch": tensor_of("target_tokens", list(torch.tensor([1.0, 2.0, 3.0]))),
    "targets as floats": tensor_of("target_tokens", [1.0, 2.0, 3.0]),
    "targets as an array": tensor_of("target_tokens", np.array([[1], [2], [3]])),
    "weights as integers": tensor_of("weights", np.array([1, 0, 1])),
    "weights as booleans": tensor_of("weights", [True, False, True]),
    "weights in half": tensor_of("weights", torch.ones(3).bfloat16()),
    "advantages": tensor_of("advantages", [np.float32(0.5), torch.tensor(1.5), 2]),
    "an array in its place": lambda t: t.TensorData([1, 2], "int64").tolist(),
    "data of NumPy": array_of(data=np.array([1.0, 2.0]), dtype="int64"),
    "data of torch": array_of(data=torch.tensor([1, 2]), dtype="int64"),
    "a matrix of NumPy": array_of(data=np.array([[1, 2]]), dtype="int64"),
    "a matrix in lists": array_of(data=[[1, 2], [3, 4]], dtype="float32", shape=[2, 2]),
    "a shape of NumPy": array_of(data=[1, 2], dtype="int64", shape=np.array([2])),
    "no data": array_of(dtype="float32"),
    "a sparse matrix of NumPy": array_of(
        data=np.array([1, 2]),
        dtype="int64",
        shape=[2, 2],
        sparse_crow_indices=np.array([0, 1, 2]),
        sparse_col_indices=np.array([0, 1]),
    ),
    "a matrix made sparse": lambda t: t.TensorData.from_torch_sparse(MATRIX).sparse_col_indices,
    "a padded matrix": lambda t: t.TensorData.from_torch_sparse(MATRIX - 1, -1).tolist(-1),
    "a dense one": lambda t: t.TensorData.from_torch_sparse(MATRIX + 1).to_torch(0).tolist(),
    "a rate of NumPy": lambda t: t.AdamParams(learning_rate=np.float32(0.5)).learning_rate,
    "a rate of torch": lambda t: t.AdamParams(learning_rate=torch.tensor(0.5)).learning_rate,
    "max_tokens of NumPy": sampling(max_tokens=np.int64(3), seed=np.int64(1), top_k=np.int64(5)),
    "max_tokens as a float": sampling(max_tokens=3.0, seed=1.0, top_k=5.0),
    "max_tokens as a text": sampling(max_tokens="3", seed="1", temperature="0.5"),
    "max_tokens of torch": sampling(max_tokens=torch.tensor(3), stop=range(2)),
    "stops of NumPy": sampling(stop=list(np.array([1, 2]))),
    "stops as floats": sampling(stop=[1.0]),
    "a tuple of stops": sampling(stop=("a", "b")),
    "samples of NumPy": asked(num_samples=np.int64(2), prompt_logprobs_last_n=np.int64(1)),
    "samples as floats": asked(num_samples=2.0, topk_prompt_logprobs=2.0),
    "a ttl of NumPy": lambda t: (
        t.SaveWeightsRequest(model_id="m", path="n", seq_id=1, ttl_seconds=np.int64(60)).ttl_seconds
    ),
    "a rank of NumPy": lambda t: t.LoraConfig(rank=np.int64(8), seed=np.int64(3)).rank,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", TAKEN_BY_BOTH)
def test_our_types_accept_what_the_official_types_accept(name: str) -> None:
    assert TAKEN_BY_BOTH[name](ours) == TAKEN_BY_BOTH[name](official)


def test_a_field_that_official_sampling_params_ignore_is_warned_of() -> None:
    assert not hasattr(official.SamplingParams(max_tokens=2, n=3), "n")
    with pytest.warns(UserWarning, match="SamplingParams has no n; it has max_tokens"):
        assert ours.SamplingParams(max_tokens=2, n=3).max_tokens == 2


class Encoded:
    """Encoding of the library `tokenizers`."""

    ids = [1, 2, 3]  # noqa: RUF012  # used by this test only


@pytest.mark.parametrize(
    "given",
    [
        np.array([1, 2, 3], dtype=np.uint32),
        np.array([1.0, 2.0, 3.0]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        BatchEncoding({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}),
        BatchEncoding({"input_ids": torch.tensor([[1, 2, 3]])}),
        Encoded(),
        iter([1, 2, 3]),
    ],
)
def test_the_output_of_a_tokenizer_is_accepted(given: Any) -> None:
    assert ours.ModelInput.from_ints(given).to_ints() == [1, 2, 3]


REFUSED: dict[str, tuple[Made, str]] = {
    "a fraction": (tokens([7, 1.5, 2.5]), r"^tokens\[1\] is 1\.5: it should be a valid integer"),
    "nothing": (tokens([1, None]), r"^tokens\[1\] is None: it should be a valid integer$"),
    "a huge token": (tokens([2**40]), r"^tokens\[0\] is 1099511627776: it should be less than"),
    "a text": (tokens("hello"), r"^tokens must be token ids, such as tokenizer\.encode\(text\)"),
    "a batch": (tokens([[1], [2]]), "^tokens are a batch of 2 sequences: give one of them$"),
    "a target": (
        tensor_of("target_tokens", np.array([1.0, 2.5, 3.5])),
        r"^loss_fn_inputs\.target_tokens: data\[1\] is 2\.5: it should be a valid integer",
    ),
    "a missing log-prob": (
        tensor_of("logprobs", [None, -1.0, -2.0]),
        r"^loss_fn_inputs\.logprobs: data\[0\] is None: it should be a valid number$",
    ),
    "no weights": (tensor_of("weights", None), r"^loss_fn_inputs\.weights: it is None, and must be"),
    "ragged weights": (tensor_of("weights", [[1.0], [2.0, 3.0]]), "lists must be rectangular$"),
    "a shape": (array_of(data=[1, 2], dtype="int64", shape=[-1]), r"^shape\[0\] is -1: it should be"),
    "another shape": (array_of(data=[1], dtype="int64", shape=[2]), r"do not fill shape \[2\]$"),
    "a type": (array_of(data=[1], dtype="int32"), "^dtype is 'int32': it must be 'int64' or"),
    "no model input": (lambda t: t.Datum([1, 2], {}), r"^model_input is \[1, 2\]: it should be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(name: str) -> None:
    made, words = REFUSED[name]
    with pytest.raises(UnsupportedInput, match=words) as refused:
        made(ours)
    assert "\n" not in str(refused.value)


def test_an_infinite_clip_norm_means_no_limit() -> None:
    assert ours.AdamParams(grad_clip_norm=float("inf")).grad_clip_norm == 0.0


def test_an_invalid_stop_is_refused_once() -> None:
    for stop in (5, {1}, ["a", 1], [[1]]):
        with pytest.raises(ValueError, match="1 validation error"):
            ours.SamplingParams(stop=stop)
