"""Arrays on the wire: conversions of TensorData and RoutedExperts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cotrain import Datum, ModelInput, RoutedExperts
from cotrain.errors import UnsupportedInput
from cotrain.wire.codec import encode_datums, wrap_datums
from cotrain.wire.tensors import TensorData
from cotrain_store.bodies.pass_body import decode_pass


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)))
def test_a_numpy_array_is_unchanged_by_a_round_trip(array: np.ndarray) -> None:
    returned = TensorData.from_numpy(array).to_numpy()
    assert returned.dtype == np.float32
    np.testing.assert_array_equal(returned, array)


@given(arrays.arrays(np.int64, (3, 2)))
def test_integers_stay_integers(array: np.ndarray) -> None:
    tensor = TensorData.from_numpy(array)
    assert tensor.dtype == "int64"
    np.testing.assert_array_equal(tensor.to_numpy(), array)


# torch warns of it once per process, for the first matrix.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@given(st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.5, -2.0]), min_size=5, max_size=5), min_size=1))
def test_a_csr_matrix_becomes_the_dense_one_it_was_made_from(rows: list[list[float]]) -> None:
    sparse = torch.tensor(rows).to_sparse_csr()
    tensor = TensorData(
        data=sparse.values().tolist(),
        dtype="float32",
        shape=list(sparse.shape),
        sparse_crow_indices=sparse.crow_indices().tolist(),
        sparse_col_indices=sparse.col_indices().tolist(),
    )
    assert tensor.tolist() == rows
    assert tensor.to_torch().equal(torch.tensor(rows))


def test_a_bfloat16_array_becomes_float32() -> None:
    tensor = TensorData.from_torch(torch.tensor([0.5, -1.0], dtype=torch.bfloat16))
    assert (tensor.dtype, tensor.data) == ("float32", [0.5, -1.0])


def test_an_empty_array_keeps_its_type_and_shape() -> None:
    tensor = TensorData.from_numpy(np.empty((0, 3), dtype=np.int64))
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == ("int64", [0, 3], [])


def test_nested_lists_must_be_rectangular() -> None:
    with pytest.raises(ValueError, match="rectangular"):
        TensorData.of([[1, 2], [3]])
    with pytest.raises(ValueError, match="rectangular"):
        TensorData.of([1, [2]])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data": [1.5], "dtype": "int64"}, "must be integers"),
        ({"data": [1, 2, 3], "dtype": "int64", "shape": [2, 2]}, "do not fill"),
        ({"data": [1], "dtype": "int64", "sparse_crow_indices": [0, 1]}, "come together"),
        ({"data": [True], "dtype": "int64"}, "must be integers"),
        ({"data": [2**63], "dtype": "int64"}, "must be integers|less than"),
        ({"data": [1], "dtype": "bfloat16"}, "dtype"),
    ],
)
def test_an_invalid_array_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TensorData.model_validate(fields)


@pytest.mark.parametrize(
    ("crow", "col", "shape", "why"),
    [
        ([0, 1], [0], None, "needs shape"),
        ([0, 1], [0], [2, 2], "rows \\+ 1"),
        ([0, 2], [0], [1, 2], "rows \\+ 1"),
        ([0, 1, 0, 1], [0], [3, 2], "not decrease"),
        ([0, 1], [2], [1, 2], "column"),
        ([0, 1], [], [1, 2], "column"),
    ],
)
def test_an_invalid_csr_matrix_is_refused(crow: list[int], col: list[int], shape: list[int] | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TensorData(data=[1.0], dtype="float32", shape=shape, sparse_crow_indices=crow, sparse_col_indices=col)


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
    message = wrap_datums("m", 1, encode_datums([ours, listed]), "cross_entropy", None, forward_only=False)
    found = decode_pass(message).datums
    for each in found:
        assert set(each.inputs) == set(inputs)
        np.testing.assert_array_equal(each.routed_experts, given)
    assert found[0].routed_experts is not None
    assert found[0].routed_experts.itemsize == (1 if given is FEW else 2)
