"""Micro-batches: cuts, packing, shared prompts, and the handling of running out of memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Op, Pass, PassOutput
from cotrain_workers.engine.routing import bucket
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.micro_batches import (
    FIRST_WAIT,
    LEAST_SHARED,
    LONGEST_WAIT,
    BatchLimits,
    Budget,
    Fail,
    MicroBatch,
    OpSlice,
    Recompute,
    Split,
    after_oom,
    cut_op,
    fill,
    shared_prompts,
    spans_of,
)
from tests.support.open_passes import assert_same_output
from tests.support.training import MIX, NewEngine, random_datum, relative_error, same_bits

lengths = st.lists(st.integers(1, 40), max_size=12)


@given(lengths=lengths, limit=st.integers(1, 64), columns=st.lists(st.integers(1, 2), min_size=12))
def test_slices_cover_an_op_in_order_and_never_split_a_datum(
    lengths: list[int], limit: int, columns: list[int]
) -> None:
    op_slices = list(cut_op(0, lengths, columns, limit, needs_grad=True))

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
        for op_slice in cut_op(owner, op, [1] * len(op), limit, needs_grad=needs_grad)
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
    op_slices = [p for owner in range(8) for p in cut_op(owner, [16, 16], [1, 1], 256, needs_grad=owner % 2 == 0)]

    assert len(fill(op_slices, 256)) == 1


def test_slices_of_a_micro_batch_follow_one_another_in_their_order() -> None:
    op_slices = [p for owner in (2, 0, 1) for p in cut_op(owner, [8, 5], [1, 1], 8, needs_grad=True)]

    (batch,) = fill(op_slices, 256)

    assert list(batch.op_slices) == op_slices
    assert batch.spans == [(0, 8), (8, 13), (13, 21), (21, 26), (26, 34), (34, 39)]


#: Of windows, of sinks, of caps on scores, of latent attention, of layers that differ in shape, and of experts.
FAMILIES = ("qwen3", "qwen3-window", "gemma2", "gpt_oss", "deepseek_v3", "gemma4")
PROMPT = LEAST_SHARED + 5
#: Tokens after the prompt: two of one length, one, and more than a window of 16.
ANSWERS = (9, 9, 1, 30)


def group(seed: int, answers: Sequence[int] = ANSWERS, loss_fn: str = "ppo") -> list[Datum]:
    """Return datums that begin with one prompt, followed by a datum of its own."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 128, PROMPT)
    datums = []
    for at, answer in enumerate(answers):
        datum = random_datum(rng, loss_fn, PROMPT + answer)
        tokens = np.concatenate([prompt, [at], datum.tokens[PROMPT + 1 :]])
        datums.append(replace(datum, tokens=tokens))
    return [*datums, random_datum(rng, loss_fn, 11)]


def ops(run: str, datums: Sequence[Datum], loss_fn: str = "ppo") -> list[Op]:
    spec = AdapterSpec(4, seed=3)
    return [
        Create(run, 0, spec),
        Pass(run, 1, datums, loss_fn, {}, needs_grad=True),
        Pass(run, 2, datums, loss_fn, {}, needs_grad=False),
    ]


def without_sharing(engine: Engine) -> Engine:
    engine._forward_backward._shares_prompts = False
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_changes_no_number_beyond_rounding(new_engine: NewEngine, family: str) -> None:
    sharing, plain = new_engine(family), without_sharing(new_engine(family))
    shared, expected = (engine.run(ops("r", group(1))) for engine in (sharing, plain))
    saved = (len(ANSWERS) - 1) * PROMPT
    assert expected.tokens - shared.tokens == 2 * saved
    for seq in (1, 2):
        ours, theirs = shared.outputs["r", seq], expected.outputs["r", seq]
        assert isinstance(ours, PassOutput)
        assert isinstance(theirs, PassOutput)
        assert (ours.shared_tokens, theirs.shared_tokens) == (saved, 0)
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5)
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
    gradients = [engine.adapters["r"].gradient.flat for engine in (sharing, plain)]
    assert relative_error(*gradients) <= 1e-5


def test_a_hybrid_shares_no_prompt(new_engine: NewEngine) -> None:
    output = new_engine("lfm2").run(ops("r", group(1))).outputs["r", 1]
    assert isinstance(output, PassOutput)
    assert output.shared_tokens == 0


def test_a_group_among_others_has_the_bits_of_the_group_alone(new_engine: NewEngine) -> None:
    among, alone = new_engine(), new_engine()
    own = ops("group", group(1))
    others = [op for tenant in MIX for op in tenant.ops(0)]
    twin = ops("twin", group(2))
    mixed = among.run([*others[:9], *twin, *own, *others[9:]])
    by_itself = alone.run(own)
    for seq in (1, 2):
        assert_same_output(mixed.outputs["group", seq], by_itself.outputs["group", seq])
    assert same_bits(among.adapters.state("group"), alone.adapters.state("group"))
    for tenant in MIX:
        alone.run(tenant.ops(0))
        assert same_bits(among.adapters.state(tenant.run), alone.adapters.state(tenant.run))


def test_recomputed_layers_share_alike(new_engine: NewEngine) -> None:
    engines = [new_engine(recompute="always"), without_sharing(new_engine(recompute="always"))]
    for engine in engines:
        engine.run(ops("r", group(1, loss_fn="gspo"), "gspo"))
    gradients = [engine.adapters["r"].gradient.flat for engine in engines]
    assert relative_error(*gradients) <= 1e-5


def test_a_group_that_does_not_fit_is_shared_within_each_part(new_engine: NewEngine) -> None:
    engine, plain = new_engine(), without_sharing(new_engine())
    whole = engine.run(ops("whole", group(1)))
    plain.run(ops("whole", group(1)))
    refused = []

    def refuse(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] > 2 * PROMPT:
            refused.append(kwargs)
            raise torch.OutOfMemoryError

    small = new_engine(recompute="never")
    handle = small._base.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        cut_up = small.run(ops("whole", group(1)))
    finally:
        handle.remove()
    assert refused
    assert whole.tokens < cut_up.tokens
    states = [each.adapters["whole"].gradient.flat for each in (small, plain)]
    assert relative_error(*states) <= 1e-5


def test_groups_are_neighbours_with_the_longest_worthwhile_prompt() -> None:
    rng = np.random.default_rng(0)
    system, first, second = (rng.integers(0, 99, 100) for _ in range(3))

    def datums(*parts: np.ndarray) -> list[Datum]:
        return [Datum(np.concatenate([*parts, [at], rng.integers(0, 99, 5)]), {}) for at in range(3)]

    one, two = datums(system, first), datums(system, second)
    # A group with a prompt of its own does not shrink to what all groups share.
    assert shared_prompts([*one, *two]) == [0, 200, 200, 0, 200, 200]
    assert shared_prompts([one[0], two[0], one[1]]) == [0, 100, 100]
    assert shared_prompts([Datum(system[:LEAST_SHARED], {})] * 2) == [0, 0]
    # Equal datums keep a row each.
    assert shared_prompts([Datum(system, {})] * 3) == [0, 99, 99]
    assert shared_prompts([]) == []
    # A prompt is shared up to the first token with other experts.
    experts = rng.integers(0, 4, (206, 2, 2))
    others = np.where(np.arange(206)[:, None, None] == 150, 3 - experts, experts)
    given = [replace(each, routed_experts=chosen) for each, chosen in zip(one[:2], (experts, others), strict=True)]
    assert shared_prompts([*given, one[2]]) == [0, 150, 0]


def test_slices_are_cut_by_their_rows() -> None:
    lengths, shared = [100, 100, 100, 30], [0, 90, 90, 0]
    slices = [*cut_op(0, lengths, [1] * 4, 120, needs_grad=True, shared=shared)]
    # The third begins a slice, so it has all of its rows.
    assert [(each.first, each.last, each.tokens) for each in slices] == [(0, 3, 120), (3, 4, 30)]
    halves = OpSlice(0, 0, 4, 150, needs_grad=True).halves(lengths, shared)
    assert [(each.first, each.last, each.tokens) for each in halves] == [(0, 1, 100), (1, 4, 140)]
    assert spans_of(8, [5, 6, 4], [0, 3, 0]) == [
        (8, 13, False), (8, 11, True), (13, 16, False), (16, 20, False),
    ]  # fmt: skip


ONE_DATUM, TWO_DATUMS = (OpSlice(0, 4, 5, 300, needs_grad=True), OpSlice(0, 4, 6, 300, needs_grad=True))
FORWARD_ONLY = OpSlice(1, 0, 1, 200, needs_grad=False)
FIRST, SECOND = OpSlice(0, 4, 5, 100, needs_grad=True), OpSlice(0, 5, 6, 200, needs_grad=True)


def batch(*op_slices: OpSlice) -> MicroBatch:
    return MicroBatch(op_slices)


OF_OPS = Split(batch(ONE_DATUM), batch(FORWARD_ONLY), cuts_slice=False)
OF_DATUMS = Split(batch(FIRST), batch(SECOND), cuts_slice=True)
CASES = {
    "ops part before anything is recomputed": (batch(ONE_DATUM, FORWARD_ONLY), [300], True, OF_OPS),
    "ops part": (batch(ONE_DATUM, FORWARD_ONLY), [300], False, OF_OPS),
    "recomputed before it is cut": (batch(TWO_DATUMS), [100, 200], True, Recompute()),
    "cut at a datum": (batch(TWO_DATUMS), [100, 200], False, OF_DATUMS),
    "one datum is recomputed": (batch(ONE_DATUM), [300], True, Recompute()),
    "one datum fails": (batch(ONE_DATUM), [300], False, Fail(300)),
    "nothing to recompute in a forward": (batch(FORWARD_ONLY), [200], True, Fail(200)),
}


@pytest.mark.parametrize(("given", "lengths", "can_recompute", "expected"), CASES.values(), ids=CASES)
def test_running_out_of_memory_is_handled_with_the_least_loss(
    given: MicroBatch, lengths: list[int], can_recompute: bool, expected: Recompute | Fail | Split
) -> None:
    assert after_oom(given, lengths, can_recompute=can_recompute) == expected


def fall(limits: BatchLimits, tokens: int, keep_tokens: int = sys.maxsize) -> None:
    """Lower the limits in a wave of their own."""
    limits.lower(tokens=tokens, keep_tokens=keep_tokens)
    limits.end_wave()


def good_waves_until(limits: BatchLimits, tokens: int) -> int:
    for waves in range(5 * LONGEST_WAIT):
        if limits.tokens == tokens:
            return waves
        limits.end_wave()
    raise AssertionError(f"still {limits.tokens}")


@pytest.mark.parametrize("keep_tokens", [0, 2048, 4096, sys.maxsize])
def test_lowered_limits_double_until_they_are_as_planned(keep_tokens: int) -> None:
    limits = BatchLimits(Budget(4096, keep_tokens))
    fall(limits, 1000, 600)
    assert (limits.tokens, limits.keep_tokens) == (1000, min(600, keep_tokens))

    assert good_waves_until(limits, 2000) == FIRST_WAIT
    assert limits.keep_tokens == min(1201, keep_tokens)
    assert good_waves_until(limits, 4000) == FIRST_WAIT
    assert good_waves_until(limits, 4096) == FIRST_WAIT
    assert limits.keep_tokens == keep_tokens


def test_each_further_failure_lengthens_the_wait() -> None:
    limits, waits = BatchLimits(Budget(4096, 4096)), []
    for _ in range(9):
        fall(limits, 2048)
        waits.append(good_waves_until(limits, 4096))

    assert waits[:3] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]
    assert waits[-1] == LONGEST_WAIT


def test_failures_of_one_wave_count_once_and_are_forgotten() -> None:
    limits = BatchLimits(Budget(4096, 4096))
    limits.lower(tokens=2048)
    fall(limits, 1024)
    assert limits.wait == FIRST_WAIT
    assert good_waves_until(limits, 4096) == 2 * FIRST_WAIT
    for _ in range(FIRST_WAIT):
        limits.end_wave()
    fall(limits, 2048)
    assert limits.wait == FIRST_WAIT


def test_limits_of_a_lowered_plan_stay() -> None:
    limits = BatchLimits(Budget(4096, sys.maxsize))
    limits.lower_plan(tokens=512, keep_tokens=1023)
    fall(limits, 256)

    assert good_waves_until(limits, 512) == FIRST_WAIT
    for _ in range(3 * FIRST_WAIT):
        limits.end_wave()
    assert (limits.tokens, limits.keep_tokens) == (512, 1023)
