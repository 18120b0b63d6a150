from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain import UnsupportedInput
from cotrain.requests.flow_control import chunks_of, combine, cut
from cotrain.types import ClientConfigResponse, ForwardBackwardOutput, TensorData
from cotrain.wire.proto import wire_pb2 as wire


def output(datums: int, **metrics: float) -> ForwardBackwardOutput:
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    tensors = [{"logprobs": TensorData(data=[float(i)], dtype="float32")} for i in range(datums)]
    return ForwardBackwardOutput(loss_fn_output_type="A", loss_fn_outputs=tensors, metrics=named)


def datum_of(size: int) -> wire.Datum:
    return wire.Datum(model_input=[wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=b"x" * size))])


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 5), st.integers(1, 100))
def test_chunks_keep_every_datum_in_order_within_both_limits(sizes: list[int], max_datums: int, max_bytes: int) -> None:
    datums = [datum_of(size) for size in sizes]
    chunks = cut(datums, max_datums, max_bytes)
    assert [datum for chunk in chunks for datum in chunk] == datums
    for chunk in chunks:
        assert len(chunk) <= max_datums
        assert len(chunk) == 1 or sum(datum.ByteSize() for datum in chunk) <= max_bytes
    assert all(chunks) or chunks == [[]]


def test_a_pass_without_datums_is_still_one_request() -> None:
    assert cut([], 1, 1) == [[]]


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(5_000, 40_000))
def test_a_pass_is_sent_whole_or_not_at_all_to_our_server(sizes: list[int], most: int) -> None:
    datums = [datum_of(size) for size in sizes]
    config = ClientConfigResponse(cotrain_max_pass_bytes=most, fwdbwd_max_chunk_len=20)
    request = wire.ForwardBackwardRequest(model_id="m" * 100, seq_id=2**31 - 1, data=datums)
    if request.ByteSize() <= most - 5_000:
        assert chunks_of(datums, config) == [datums]
    elif request.ByteSize() > most:
        with pytest.raises(UnsupportedInput, match="Send it in several calls"):
            chunks_of(datums, config)


def test_our_server_states_its_maximum_number_of_datums() -> None:
    config = ClientConfigResponse(cotrain_max_pass_bytes=10**9, fwdbwd_max_chunk_len=2)
    assert chunks_of([datum_of(1)] * 2, config) == [[datum_of(1)] * 2]
    with pytest.raises(UnsupportedInput, match=r"data has 3 datums; one call takes up to 2 here"):
        chunks_of([datum_of(1)] * 3, config)


def test_one_chunk_is_the_whole_result() -> None:
    whole = output(2, loss__sum=1.0, odd=3.0)
    assert combine([whole]) is whole


def test_datums_are_joined_in_the_order_of_the_chunks() -> None:
    joined = combine([output(3), output(2)])
    assert [datum["logprobs"].data for datum in joined.loss_fn_outputs] == [[0], [1], [2], [0], [1]]


@pytest.mark.parametrize(
    ("name", "combined"), [("sum", 5.0), ("min", 1.0), ("max", 4.0), ("mean", 1.75), ("slack", 2.25)]
)
def test_a_metric_is_combined_according_to_its_name(name: str, combined: float) -> None:
    parts = [output(3, **{f"x__{name}": 1.0}), output(1, **{f"x__{name}": 4.0})]
    assert combine(parts).metrics == {f"x:{name}": combined}


def test_unique_metrics_keep_every_value_under_its_own_name() -> None:
    parts = [output(1, clock__unique=7), output(1, clock__unique=7), output(1, clock__unique=8)]
    assert combine(parts).metrics == {"clock:unique": 7, "clock:unique_1": 7, "clock:unique_2": 8}


def test_a_metric_missing_in_a_chunk_or_of_unknown_kind_is_left_out() -> None:
    parts = [output(1, a__sum=1, b__sum=1, c__other=1, d=1), output(1, a__sum=2, c__other=1, d=1)]
    assert combine(parts).metrics == {"a:sum": 3}


def test_a_mean_over_chunks_without_datums_is_the_plain_mean() -> None:
    assert combine([output(0, a__mean=1.0), output(0, a__mean=3.0)]).metrics == {"a:mean": 2.0}
