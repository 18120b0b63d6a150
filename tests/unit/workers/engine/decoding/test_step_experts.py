"""Experts of a decoder step compared with the loop over experts and adapters, in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import model_runner
from cotrain_workers.engine.decoding.expert_check import (
    SPECS,
    difference,
    experts_are_right,
    random_slots,
    run,
)
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.decoding.step_experts import StepExperts, experts_of_step, units_of
from cotrain_workers.engine.lora.fused.operators import CLAMPED, SILU
from cotrain_workers.engine.lora.fused.step_expert_operators import PROMPT_ROWS, ROW_ROWS
from cotrain_workers.engine.model.kernel_check import RandomExperts, Tokens, random_tokens
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import decoder_of, finish, request
from tests.support.draws import variant
from tests.support.lora_problem import CPU, needs_kernels
from tests.support.mixtures import random_weights
from tests.support.training import NewEngine

pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

EXPERTS = 5


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bits of a row of a product independent of its place in a tile, as they are on a GPU."""
    monkeypatch.setattr(np, "matmul", lambda left, right, dtype=None: np.einsum("ik,kj->ij", left, right))


def problem(rows: Sequence[int | None], route: Any = None) -> tuple[RandomExperts, Tokens, list[Slot | None]]:
    """Return random experts, tokens with a route `[T][k]`, and the slot of each token."""
    module = RandomExperts((40, 24), CPU, torch.float32, EXPERTS)
    adapters = random_slots(module, SPECS)
    tokens = random_tokens(module, len(rows))
    if route is not None:
        index = torch.tensor([route] * len(rows))
        tokens = tokens._replace(chosen=index, weights=tokens.weights[:, : index.shape[1]])
    return module, tokens, [None if each is None else adapters[each] for each in rows]


def kernels(module: RandomExperts, slots: Sequence[Slot | None], is_prompt: Sequence[bool]) -> StepExperts:
    return experts_of_step(units_of(module.targets), slots, is_prompt, len(slots), CPU)


@pytest.mark.parametrize(
    ("dtype", "most", "gate"),
    [(torch.float32, 1e-6, SILU), (torch.bfloat16, 0.05, SILU), (torch.float32, 1e-6, CLAMPED)],
)
def test_kernels_equal_the_loop(dtype: torch.dtype, most: float, gate: int) -> None:
    assert difference(CPU, dtype, gate=gate) <= most


@pytest.mark.parametrize("route", [[2], [4, 1]], ids=["one expert has all rows", "experts without rows"])
@pytest.mark.parametrize("height", [ROW_ROWS, variant(PROMPT_ROWS)])
def test_any_route_equals_the_loop(route: list[int], height: int) -> None:
    rows = [None] * 3 + [0] * (height - 1) + [2] * 5 + [3] * height
    module, tokens, slots = problem(rows, route)
    is_prompt = [height == PROMPT_ROWS] * len(rows)

    expected = run(module, tokens, slots, None)
    found = run(module, tokens, slots, kernels(module, slots, is_prompt))

    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("neighbour", [2, 3], ids=["of shared matrices", "of matrices of single experts"])
def test_a_row_has_the_same_bits_alone_and_beside_neighbours_of_nan(neighbour: int) -> None:
    rows = [None, *[neighbour] * 18, 0, 0, 5 - neighbour, neighbour, 1]
    is_bad = torch.tensor([each == neighbour for each in rows])
    # Every second row of the neighbour is of a prompt, and so in other tiles.
    is_prompt = [each == neighbour and at % 2 == 0 for at, each in enumerate(rows)]
    module, tokens, slots = problem(rows)
    alone = {
        at: run(
            module,
            Tokens(*(each[at : at + 1] for each in tokens)),
            slots[at : at + 1],
            kernels(module, slots[at : at + 1], [False]),
        )[0]
        for at in range(len(rows))
        if not is_bad[at]
    }
    for values in (tokens.x, tokens.weights):
        values[is_bad] = torch.nan
    slot = slots[1]
    assert slot is not None
    slot.pool.flat[slot.index] = torch.nan

    found = run(module, tokens, slots, kernels(module, slots, is_prompt))

    assert found[is_bad].isnan().all()
    for at, expected in alone.items():
        assert torch.equal(found[at], expected), at


def test_rows_without_an_adapter_are_those_of_the_base_model() -> None:
    rows = [None, 0, None, 1, None]
    module, tokens, slots = problem(rows)
    none: list[Slot | None] = [None] * len(rows)

    base = run(module, tokens, none, kernels(module, none, [False] * 5))
    found = run(module, tokens, slots, kernels(module, slots, [False] * 5))

    is_base = torch.tensor([each is None for each in rows])
    assert torch.equal(found[is_base], base[is_base])
    assert not torch.isclose(found[~is_base], base[~is_base]).all(dim=1).any()
    assert (base - run(module, tokens, none, None)).abs().max() <= 1e-6 * base.abs().max()


def test_a_graph_computes_other_adapters_of_the_same_sizes() -> None:
    module, tokens, slots = problem([None, 0, 1, 2, 3, 3])
    step = kernels(module, slots, [False] * 6)
    other = [slots[at] for at in (3, 3, 1, 4, 0)]  # the last row is filler

    step.replace(other)

    found = run(module, tokens, [*other, None], step)
    expected = run(module, tokens, [*other, None], None)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_wrong_kernels_are_not_used_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Slot, "address", property(lambda slot: slot.pool.flat.data_ptr() + 64))

    with caplog.at_level(logging.ERROR):
        assert not experts_are_right(CPU, torch.float32)

    assert "The decoder's kernel of experts, without which it is slow, is off by" in caplog.text


@pytest.mark.numerics
def test_samples_of_kernels_equal_those_of_the_loop(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine("qwen3_moe", layers=1)
    specs = {"all-8": AdapterSpec(8, 1), "own-3": AdapterSpec(3, 2, per_expert=True)}
    weights = {name: random_weights(engine, name, spec) for name, spec in specs.items()}
    asked = [
        request(f"{run}-{size}", np.arange(3, 3 + size), run, temperature=0.0, max_tokens=3, return_routed_experts=True)
        for run in (*specs, None)
        for size in (1, 17)
    ]
    expected = finish(decoder_of(engine, weights), asked)
    monkeypatch.setattr(model_runner, "fused_units", lambda base: units_of(base.targets))

    found = finish(decoder_of(engine, weights), asked)

    for name, theirs in expected.items():
        ours = found[name]
        assert isinstance(ours, SampleOutput)
        assert isinstance(theirs, SampleOutput)
        (one,), (other,) = ours.sequences, theirs.sequences
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.routed_experts is not None
        assert other.routed_experts is not None
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
