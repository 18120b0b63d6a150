"""Bodies of passes: decoded correctly, or refused with the documented error, whatever the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cotrain.wire.codec import decode_pass_output
from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies import pass_body
from cotrain_store.bodies.pass_body import decode_pass, encode_pass_output, parse_pass
from cotrain_store.errors import MalformedBody

DTYPES = {np.dtype("f4"): wire_pb2.DTYPE_FLOAT32, np.dtype("i8"): wire_pb2.DTYPE_INT64}
BIG = 2**63 - 1


def request_with(**tensor: Any) -> wire_pb2.ForwardBackwardRequest:
    """Return a request with one valid datum and one whose input `x` is this tensor."""
    request = wire_pb2.ForwardBackwardRequest(model_id="r", seq_id=1, loss_fn="cross_entropy")
    request.data.add()
    request.data.add().loss_fn_inputs["x"].CopyFrom(wire_pb2.Tensor(**{"dtype": wire_pb2.DTYPE_FLOAT32, **tensor}))
    return request


def csr(values: Any, crow: Any, col: Any) -> wire_pb2.SparseCsr:
    return wire_pb2.SparseCsr(
        values=np.asarray(values, "<f4").tobytes(),
        crow_indices=np.asarray(crow, "<i8").tobytes(),
        col_indices=np.asarray(col, "<i8").tobytes(),
    )


values = st.one_of(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=2, max_side=5, min_side=0)),
    arrays.arrays(np.int64, arrays.array_shapes(min_dims=1, max_dims=2, max_side=5, min_side=0)),
)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=3), values)
def test_a_body_of_the_client_is_decoded_unchanged(chunks: list[list[int]], given: np.ndarray) -> None:
    request = wire_pb2.ForwardBackwardRequest(loss_fn="ppo", forward_only=True)
    datum = request.data.add()
    for chunk in chunks:
        datum.model_input.add().encoded_text.tokens = np.asarray(chunk, "<i4").tobytes()
    tensor = datum.loss_fn_inputs["x"]
    tensor.dtype, tensor.dense = DTYPES[given.dtype], given.tobytes()
    tensor.shape.extend(given.shape)

    read = decode_pass(parse_pass(request.SerializeToString()))
    assert (read.loss_fn, read.forward_only) == ("ppo", True)
    assert read.num_tokens == sum(map(len, chunks))
    assert read.datums[0].tokens.tolist() == [token for chunk in chunks for token in chunk]
    assert read.datums[0].tokens.dtype == np.int64
    np.testing.assert_array_equal(read.datums[0].inputs["x"], given, strict=True)


@given(
    st.integers(1, 5).flatmap(
        lambda columns: st.lists(st.dictionaries(st.integers(0, columns - 1), st.integers(-9, 9)), max_size=5).map(
            lambda rows: (columns, rows)
        )
    )
)
def test_a_sparse_matrix_becomes_dense_with_zeros(matrix: tuple[int, list[dict[int, int]]]) -> None:
    columns, rows = matrix
    dense = np.zeros((len(rows), columns), np.float32)
    for at, row in enumerate(rows):
        for column, value in row.items():
            dense[at, column] = value
    sparse = csr(
        [value for row in rows for value in row.values()],
        np.cumsum([0, *map(len, rows)]),
        [column for row in rows for column in row],
    )
    request = request_with(sparse_csr=sparse, shape=dense.shape)
    read = decode_pass(request).datums[1].inputs["x"]
    np.testing.assert_array_equal(read, dense, strict=True)


def test_a_tensor_without_a_shape_is_a_list() -> None:
    dense = np.arange(3, dtype="<f4").tobytes()
    assert decode_pass(request_with(dense=dense)).datums[1].inputs["x"].tolist() == [0.0, 1.0, 2.0]


def test_small_integers_are_read_as_int64() -> None:
    dense = np.array([-1, 2], "<i4").tobytes()
    read = decode_pass(request_with(dense=dense, dtype=wire_pb2.DTYPE_INT32)).datums[1].inputs["x"]
    np.testing.assert_array_equal(read, np.array([-1, 2]), strict=True)


def test_decoding_yields_after_each_block_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of very many tiny datums takes most of a second, and sampling runs at the yield points."""
    request = wire_pb2.ForwardBackwardRequest()
    for at in range(10):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([at], "<i4").tobytes()
        for name, value in (("x", at / 2), ("y", -at)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = wire_pb2.DTYPE_FLOAT32, np.float32(value).tobytes()
            tensor.shape.append(1)
    monkeypatch.setattr(pass_body, "BLOCK_TENSORS", 7)
    yields, body = 0, None

    def work() -> Iterator[None]:
        nonlocal body
        body = yield from pass_body.decoding(request)

    for _ in work():
        yields += 1
    assert yields == 3  # each after three datums
    assert body is not None
    found = [(*datum.tokens, *datum.inputs["x"], *datum.inputs["y"]) for datum in body.datums]
    assert found == [(at, at / 2, -at) for at in range(10)]


def test_loss_settings_are_read_from_both_maps_with_the_newer_first() -> None:
    request = wire_pb2.ForwardBackwardRequest(loss_fn_config={"a": 1.0, "b": 2.0})
    request.loss_fn_config_v2["b"].number = 3.0
    request.loss_fn_config_v2["c"].text = "word"
    assert decode_pass(request).loss_config == {"a": 1.0, "b": 3.0, "c": "word"}


MALFORMED = {
    "half a number": {"dense": b"123"},
    "an unknown dtype": {"dense": b"", "dtype": 99},
    "more values than its shape": {"dense": b"\0" * 8, "shape": [1]},
    "fewer values than its shape": {"dense": b"\0" * 8, "shape": [3]},
    "no values": {"shape": [1]},
    "a negative side": {"dense": b"", "shape": [-1]},
    "two negative sides": {"dense": b"\0" * 4, "shape": [-1, -1]},
    "more elements than memory": {"dense": b"", "shape": [BIG, BIG]},
    "more sparse elements than memory": {"sparse_csr": csr([], [0, 0], []), "shape": [1, BIG]},
    "a sparse vector": {"sparse_csr": csr([], [0], []), "shape": [1]},
    "a sparse tensor without shape": {"sparse_csr": csr([], [0], [])},
    "no row starts": {"sparse_csr": csr([], [], []), "shape": [1, 1]},
    "too few row starts": {"sparse_csr": csr([1], [0, 1], [0]), "shape": [2, 1]},
    "a first row that starts late": {"sparse_csr": csr([1], [1, 1], [0]), "shape": [1, 1]},
    "a last row that ends early": {"sparse_csr": csr([1], [0, 0], [0]), "shape": [1, 1]},
    "rows that go backwards": {"sparse_csr": csr([1], [0, 2, 1], [0]), "shape": [2, 1]},
    "row starts that overflow": {"sparse_csr": csr([], [0, BIG, -2, 0], []), "shape": [3, 1]},
    "a column outside": {"sparse_csr": csr([1], [0, 1], [1]), "shape": [1, 1]},
    "a negative column": {"sparse_csr": csr([1], [0, 1], [-1]), "shape": [1, 1]},
    "fewer columns than values": {"sparse_csr": csr([1, 2], [0, 2], [0]), "shape": [1, 2]},
    "half a row start": {"sparse_csr": wire_pb2.SparseCsr(crow_indices=b"123"), "shape": [0, 1]},
}


@pytest.mark.parametrize("tensor", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_tensor_is_named(tensor: dict[str, Any]) -> None:
    with pytest.raises(MalformedBody, match=r"^datum 1: loss_fn_inputs\.x "):
        decode_pass(request_with(**tensor))


def test_an_image_is_refused_with_its_datum() -> None:
    request = wire_pb2.ForwardBackwardRequest()
    request.data.add()
    request.data.add().model_input.add().image.SetInParent()
    with pytest.raises(MalformedBody, match="datum 1: model_input has an image that was not placed"):
        decode_pass(request)


def test_an_empty_chunk_is_refused() -> None:
    request = wire_pb2.ForwardBackwardRequest()
    request.data.add().model_input.add()
    with pytest.raises(MalformedBody, match="datum 0: model_input has a chunk of type unknown"):
        decode_pass(request)


def test_a_token_with_a_fraction_is_refused() -> None:
    request = wire_pb2.ForwardBackwardRequest()
    request.data.add().model_input.add().encoded_text.tokens = b"12345"
    with pytest.raises(MalformedBody, match="datum 0: model_input tokens are not a list"):
        decode_pass(request)


indices = st.lists(st.one_of(st.integers(-3, 6), st.sampled_from([BIG, -BIG - 1, 2**62, -2])), max_size=5)


@given(
    values=st.lists(st.floats(width=32), max_size=4),
    crow=indices,
    col=indices,
    shape=st.lists(st.integers(-1, 4), max_size=3),
)
def test_a_sparse_tensor_raises_only_the_documented_error(
    values: list[float], crow: list[int], col: list[int], shape: list[int]
) -> None:
    request = request_with(sparse_csr=csr(values, crow, col), shape=shape)
    try:
        read = decode_pass(request).datums[1].inputs["x"]
    except MalformedBody:
        return
    assert read.shape == tuple(shape)


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_the_documented_error(body: bytes) -> None:
    try:
        decode_pass(parse_pass(body))
    except MalformedBody:
        return


@given(st.data())
def test_any_change_of_a_valid_body_raises_only_the_documented_error(data: st.DataObject) -> None:
    request = request_with(sparse_csr=csr([1, 2], [0, 1, 2], [0, 1]), shape=[2, 2])
    request.data[0].model_input.add().encoded_text.tokens = np.arange(4, dtype="<i4").tobytes()
    body = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_pass(parse_pass(bytes(body)))
    except MalformedBody:
        return


@given(
    st.lists(
        st.one_of(
            arrays.arrays(np.float32, st.integers(0, 5), elements=st.floats(width=32)),
            arrays.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 3))),
        ),
        max_size=6,
    ),
    st.dictionaries(st.sampled_from(["loss:sum", "x"]), st.floats(allow_nan=False)),
)
def test_an_output_is_decoded_unchanged_by_the_client(logprobs: list[np.ndarray], metrics: dict[str, float]) -> None:
    read = decode_pass_output(encode_pass_output(logprobs, metrics))
    assert read.metrics == metrics
    assert len(read.loss_fn_outputs) == len(logprobs)
    for output, expected in zip(read.loss_fn_outputs, logprobs, strict=True):
        tensor = output["logprobs"]
        np.testing.assert_array_equal(np.asarray(tensor.data, np.float32), expected.ravel())
        assert list(tensor.shape or [len(expected)]) == list(expected.shape)


def test_an_output_always_has_the_same_encoding() -> None:
    logprobs = [np.array([1.5], np.float32)]
    first = encode_pass_output(logprobs, {"a": 1.0, "b": 2.0})
    assert first == encode_pass_output(logprobs, {"b": 2.0, "a": 1.0})
