"""Prompts that datums of a pass share: the same numbers as without sharing, in fewer rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Op, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.micro_batches import OpSlice, cut
from cotrain_workers.engine.training.shared_prompts import LEAST_SHARED, shared_prompts, spans_of
from tests.support.open_passes import assert_same_output
from tests.support.training import MIX, NewEngine, random_datum, relative_error, same_bits

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


@pytest.mark.parametrize("settings", [{"lora_backend": "grouped"}, {"recompute": "always"}])
def test_backends_and_recomputed_layers_share_alike(new_engine: NewEngine, settings: dict[str, str]) -> None:
    engines = [new_engine(**settings), without_sharing(new_engine(**settings))]
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
    slices = [*cut(0, lengths, [1] * 4, 120, needs_grad=True, shared=shared)]
    # The third begins a slice, so it has all of its rows.
    assert [(each.first, each.last, each.tokens) for each in slices] == [(0, 3, 120), (3, 4, 30)]
    halves = OpSlice(0, 0, 4, 150, needs_grad=True).halves(lengths, shared)
    assert [(each.first, each.last, each.tokens) for each in halves] == [(0, 1, 100), (1, 4, 140)]
    assert spans_of(8, [5, 6, 4], [0, 3, 0]) == [
        (8, 13, False), (8, 11, True), (13, 16, False), (16, 20, False),
    ]  # fmt: skip
