"""RoutedExperts: from arrays and lists, and joined or cut by tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cotrain import Datum, ModelInput, RoutedExperts
from cotrain.errors import UnsupportedInput
from cotrain.wire.codec import encode_pass_request
from cotrain_store.bodies.pass_body import decode_pass

FEW = np.arange(12).reshape(3, 2, 2)


@pytest.mark.parametrize("values", [FEW, FEW.tolist(), torch.from_numpy(FEW), RoutedExperts.of(FEW)])
def test_arrays_and_lists_give_the_same(values: Any) -> None:
    made = RoutedExperts.of(values)
    assert (made.dtype, made.shape, made.tokens) == ("int8", (3, 2, 2), 3)
    assert made.tolist() == FEW.tolist()
    assert RoutedExperts.model_validate_json(made.model_dump_json()) == made


def test_tokens_are_joined_and_cut() -> None:
    many = RoutedExperts.of(FEW + 250)
    assert many.dtype == "int16"
    both = RoutedExperts.of(FEW) + many
    np.testing.assert_array_equal(both.to_numpy(), np.concatenate([FEW, FEW + 250]))
    np.testing.assert_array_equal(both[2:-1].to_numpy(), both.to_numpy()[2:-1])
    assert both[5:2].shape == (0, 2, 2)
    with pytest.raises(UnsupportedInput, match="adjacent tokens"):
        both[::2]
    with pytest.raises(UnsupportedInput, match="of other models"):
        both + RoutedExperts.of(FEW[:, :1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FEW[0], "must have shape"),
        (FEW - 2, "numbers of experts, or -1"),
        (FEW + 2**15, "numbers of experts, or -1"),
        ([[[0.5]]], "valid integer"),
    ],
)
def test_other_values_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        RoutedExperts.of(values)


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes do not fill"):
        RoutedExperts(data=b"abc", dtype="int8", shape=(1, 2, 2))


@pytest.mark.parametrize("given", [FEW, FEW + 250])
def test_a_datum_brings_its_experts_to_the_server(given: np.ndarray) -> None:
    inputs = {"target_tokens": [1, 2, 3], "weights": [1.0] * 3}
    ours = Datum(ModelInput.from_ints([5, 6, 7]), inputs, routed_experts=given)
    listed = Datum(ours.model_input, {**inputs, "routed_experts": given})  # as of the hosted SDK
    message = encode_pass_request("m", 1, [ours, listed], "cross_entropy", None, forward_only=False)
    found = decode_pass(message).datums
    for each in found:
        assert set(each.inputs) == set(inputs)
        np.testing.assert_array_equal(each.routed_experts, given)
    assert found[0].routed_experts is not None
    assert found[0].routed_experts.itemsize == (1 if given is FEW else 2)
