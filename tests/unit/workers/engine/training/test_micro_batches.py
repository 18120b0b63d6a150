from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.engine.routing import bucket
from cotrain_workers.engine.training.micro_batches import cut, fill

lengths = st.lists(st.integers(1, 40), max_size=12)


@given(lengths=lengths, limit=st.integers(1, 64), columns=st.lists(st.integers(1, 2), min_size=12))
def test_slices_cover_an_op_in_order_and_never_split_a_datum(
    lengths: list[int], limit: int, columns: list[int]
) -> None:
    op_slices = list(cut(0, lengths, columns, limit, needs_grad=True))

    covered = [at for op_slice in op_slices for at in range(op_slice.first, op_slice.last)]
    assert covered == list(range(len(lengths)))
    for op_slice in op_slices:
        assert op_slice.tokens == sum(lengths[op_slice.first : op_slice.last])
        assert op_slice.tokens <= limit or op_slice.last - op_slice.first == 1
        assert len(set(columns[op_slice.first : op_slice.last])) == 1


@given(ops=st.lists(st.tuples(lengths, st.booleans()), max_size=6), limit=st.integers(1, 64))
def test_micro_batches_have_every_slice_once_with_gradients_first(
    ops: list[tuple[list[int], bool]], limit: int
) -> None:
    op_slices = [
        op_slice
        for owner, (op, needs_grad) in enumerate(ops)
        for op_slice in cut(owner, op, [1] * len(op), limit, needs_grad=needs_grad)
    ]

    batches = fill(op_slices, limit)

    in_batches = [op_slice for batch in batches for op_slice in batch.op_slices]
    assert in_batches == sorted(op_slices, key=lambda op_slice: not op_slice.needs_grad)
    for batch in batches:
        assert batch.tokens <= limit or len(batch.op_slices) == 1
        assert batch.needs_grad == any(op_slice.needs_grad for op_slice in batch.op_slices)


@given(st.integers(1, 100_000))
def test_a_bucket_fits_its_tokens_with_little_filler(tokens: int) -> None:
    assert tokens <= bucket(tokens) < tokens + 128
    assert bucket(tokens) >= 32
    assert bucket(bucket(tokens)) == bucket(tokens)


def test_slices_that_fit_one_micro_batch_are_one_micro_batch() -> None:
    op_slices = [p for owner in range(8) for p in cut(owner, [16, 16], [1, 1], 256, needs_grad=owner % 2 == 0)]

    assert len(fill(op_slices, 256)) == 1


def test_slices_of_a_micro_batch_are_in_the_order_of_owners_and_plan() -> None:
    op_slices = [p for owner in (0, 1, 2) for p in cut(owner, [8, 8], [1, 1], 8, needs_grad=True)]

    (batch,) = fill(op_slices, 256, 8, [16, 4, 16])

    assert [(p.owner, p.first) for p in batch.op_slices] == [
        (1, 0), (1, 1), (0, 0), (0, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert batch.spans == [(start, start + 8) for start in range(0, 48, 8)]
