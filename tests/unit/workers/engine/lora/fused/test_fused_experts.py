"""Fused experts compared with the loop over adapters and experts, and a run among others, in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora import backend
from cotrain_workers.engine.lora.backend import BackendUnfit, find_backend
from cotrain_workers.engine.lora.fused import expert_operators, fused_experts, fused_lora
from cotrain_workers.engine.lora.fused.operators import CLAMPED, SILU
from cotrain_workers.engine.lora.fused.tables import ROWS
from cotrain_workers.engine.model import kernel_check
from cotrain_workers.engine.model.kernel_check import (
    RandomExperts,
    Tokens,
    random_experts,
    random_tokens,
    run,
    segments_of,
    wrong_result,
)
from cotrain_workers.engine.ops import PassOutput
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.engine_checks import gradient_passes
from tests.support.lora_problem import CPU, needs_kernels
from tests.support.tiny_models import build_tiny
from tests.support.training import Tenant, relative_error

#: The interpreter warns of infinities inside a sigmoid, and of sums of values that no adapter reads.
pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

#: Ranks and the number of experts are all different. The second adapter has all matrices for each expert.
SPECS = tuple(AdapterSpec(rank, seed=0, alpha=alpha) for rank, alpha in ((9, 3.0), (2, 2.0), (20, 8.0)))
LENGTHS = (9, 1, 5)
EXPERTS = 4
#: Another expert for each token; one expert; and experts that nobody chooses.
ROUTES = {
    "each expert in turn": lambda rows: [[at % 4, (at + 2) % 4] for at in range(rows)],
    "one expert has all rows": lambda rows: [[2]] * rows,
    "empty experts": lambda rows: [[3, 1]] * rows,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the rows of an adapter in an expert among fewer programs; the interpreter is slow."""
    monkeypatch.setattr(expert_operators, "EXPERT_PARTS", 1)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bits of a row of a product independent of its place in a tile, as they are on a GPU.

    The BLAS of the interpreter computes rows at the end of a tile in another order.
    """
    monkeypatch.setattr(np, "matmul", lambda left, right, dtype=None: np.einsum("ik,kj->ij", left, right))


def experts(dtype: torch.dtype = torch.float32, gate: int = SILU) -> RandomExperts:
    return random_experts(gate, (40, 24), CPU, dtype, experts=EXPERTS)


def tokens_of(module: RandomExperts, rows: int, route: str) -> Tokens:
    index = torch.tensor(ROUTES[route](rows))
    tokens = random_tokens(module, rows)
    return tokens._replace(chosen=index, weights=tokens.weights[:, : index.shape[1]])


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each result, relative to its largest value."""
    assert ours.keys() == theirs.keys()
    return {
        name: float((ours[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in theirs.items()
    }


@pytest.mark.parametrize(
    ("dtype", "most", "route", "gate"),
    [
        *((torch.float32, 2e-6, route, SILU) for route in ROUTES),
        (torch.bfloat16, 0.1, "empty experts", SILU),
        (torch.float32, 2e-6, "each expert in turn", CLAMPED),
    ],
)
def test_fused_experts_equal_the_loop(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: float, route: str, gate: int
) -> None:
    monkeypatch.setattr(expert_operators, "EXPERT_PARTS", 2)
    module = experts(dtype, gate)
    lengths = (ROWS + 23, *LENGTHS[1:]) if route == "one expert has all rows" else LENGTHS
    tokens = tokens_of(module, sum(lengths) + 3, route)

    expected = run(module, segments_of(module, SPECS, lengths), tokens, "seg")
    found = run(module, segments_of(module, SPECS, lengths), tokens, "fused")

    for name, difference in largest_difference(found, expected).items():
        assert difference <= most, name


def test_tiles_copied_by_descriptors_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts()
    tokens = tokens_of(module, sum(LENGTHS), "each expert in turn")
    expected = run(module, segments_of(module, SPECS, LENGTHS), tokens, "fused")
    monkeypatch.setattr(expert_operators, "copies_by_tma", lambda _operands: True)
    # Three programs share the tiles, as the multiprocessors of a GPU do.
    monkeypatch.setattr(expert_operators, "programs_of", lambda tiles, _device: min(tiles, 3))

    found = run(module, segments_of(module, SPECS, LENGTHS), tokens, "fused")

    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("row_by_row")
def test_a_run_has_the_same_bits_alone_and_beside_a_neighbour_of_nan() -> None:
    module = experts()
    tokens = tokens_of(module, sum(LENGTHS), "each expert in turn")
    neighbour = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    segments = segments_of(module, SPECS, LENGTHS)
    segments[1].source.weights.fill_(torch.nan)
    for each in (tokens.x, tokens.slopes, tokens.weights):
        each[neighbour] = torch.nan

    together = run(module, segments, tokens, "fused")

    for at in (0, 2):
        own = slice(segments[at].start, segments[at].stop)
        alone = run_alone(module, segments[at], Tokens(*(each[own] for each in tokens)))
        for name, value in alone.items():
            among = together[name.replace("adapter 0", f"adapter {at}")]
            among = among if "adapter" in name else among[own]
            assert torch.equal(among, value), (at, name)
            assert value.isfinite().all()
    assert together["output"][neighbour].isnan().all()


def run_alone(module: RandomExperts, segment: Segment, tokens: Tokens) -> dict[str, torch.Tensor]:
    """Return the results of the rows of one segment, without the others."""
    arena = torch.zeros_like(segment.source.weights)
    grads = segment.source.layout.views(arena)
    return run(module, [replace(segment, start=0, stop=len(tokens.x), grads=grads)], tokens, "fused")


@pytest.mark.usefixtures("row_by_row")
def test_two_segments_of_one_gradient_add_up_in_their_order() -> None:
    module = experts()
    tokens = tokens_of(module, 8, "empty experts")
    (whole,) = segments_of(module, SPECS[:1], [8])
    arenas = [torch.zeros_like(whole.source.weights) for _ in range(2)]
    views = [whole.source.layout.views(arena) for arena in arenas]

    both = [replace(whole, start=at, stop=at + 4, grads=views[0]) for at in (0, 4)]
    run(module, both, tokens, "fused")
    for own in (slice(0, 4), slice(4, 8)):
        part = replace(whole, start=0, stop=4, grads=views[1])
        run(module, [part], Tokens(*(each[own] for each in tokens)), "fused")

    assert arenas[0].abs().max() > 0
    assert torch.equal(*arenas)


def test_the_check_in_16_bits_accepts_the_gate_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding at a limit of the gate decides whether a value has a gradient, so the check has no values there."""
    for name, value in {"LENGTHS": LENGTHS, "SPECS": SPECS, "SIZES": (40, 24), "EXPERTS": EXPERTS}.items():
        monkeypatch.setattr(kernel_check, name, value)

    assert wrong_result(CPU, torch.bfloat16, CLAMPED) is None


def test_a_device_with_wrong_experts_gets_the_loop_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"LENGTHS": LENGTHS, "SPECS": SPECS, "SIZES": (40, 24), "EXPERTS": EXPERTS}
    for name, value in small.items():
        monkeypatch.setattr(kernel_check, name, value)
    real = fused_experts.find_probes

    def shifted(spans: Sequence[tuple[int, int]], *rest: Any) -> torch.Tensor:
        return real([(start, max(start, stop - 1)) for start, stop in spans], *rest)

    monkeypatch.setattr(fused_lora, "find_probes", shifted)
    reason = wrong_result(CPU, torch.float32)
    assert reason is not None
    assert "its output of experts differs from that of a loop" in reason

    monkeypatch.setattr(backend, "disagreement", lambda *_, **__: None)
    targets, wrong = experts().targets, (lambda *_: reason)
    weight: Any = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        found = find_backend("auto", targets, weight, check_experts=wrong)
    assert found.name == "seg"
    assert reason in caplog.text
    assert found.fallback_reason == f"not fused: {reason}"
    with pytest.raises(BackendUnfit, match="'fused' cannot be used: its output of experts"):
        find_backend("fused", targets, torch.zeros(1), check_experts=wrong)
    assert find_backend("auto", targets, weight, check_experts=lambda *_: None).name == "fused"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *map(variant, ("qwen2_moe", "deepseek_v3"))])
def test_passes_of_a_mixture_equal_those_of_seg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    for each in (backend, kernel_check):
        monkeypatch.setattr(each, "disagreement", lambda *_, **__: None)
    folder = build_tiny(family, tmp_path, layers=1 if family in ("qwen3_moe", "gpt_oss") else 2)
    seg, fused = (Engine.load(str(folder), dtype=torch.float32, lora_backend=each) for each in ("seg", "fused"))
    assert (fused.facts.numerics.lora, fused.facts.lora_fallback) == ("fused", "")
    tenants = (
        Tenant("all-9", AdapterSpec(9, seed=5), "importance_sampling", (2, 5)),
        Tenant("mlp-4", AdapterSpec(4, 3, train_attn=False, alpha=4.0), "gspo", (3,)),
    )
    seg.run([op for tenant in tenants for op in tenant.ops(0)])  # afterwards no B is zero
    for tenant in tenants:
        fused.adapters.restore(tenant.run, seg.adapters.state(tenant.run))

    passes = gradient_passes(tenants)
    expected, found = (each.run(passes).outputs for each in (seg, fused))

    for op in passes:
        theirs, ours = expected[op.run, op.seq], found[op.run, op.seq]
        assert isinstance(theirs, PassOutput)
        assert isinstance(ours, PassOutput)
        assert abs(ours.loss_sum - theirs.loss_sum) < 1e-5 * max(1.0, abs(theirs.loss_sum))
    for tenant in tenants:
        gradients = [each.adapters.state(tenant.run).grads for each in (fused, seg)]
        assert relative_error(*gradients) < 1e-5
