"""Backend `fused` compared with `seg`, and with itself among other tenants, in Triton's interpreter."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.lora.backend import BackendUnfit, find_backend
from cotrain_workers.engine.lora.fused import fused_lora, operators
from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.lora.fused.tables import ROWS, Tables, make_tables
from cotrain_workers.engine.lora.quantized import Quantization, QuantizedWeight
from cotrain_workers.engine.lora.self_check import TARGETS, disagreement
from cotrain_workers.engine.spec import AdapterSpec
from tests.support import lora_problem
from tests.support.draws import variant
from tests.support.lora_problem import CPU, Tenant, differences, needs_kernels, same, tenant, work

#: Sigmoid 1 / (1 + exp(-z)) in the interpreter: exp gives infinity, and the quotient a correct zero.
OVERFLOW = "ignore:overflow encountered in exp:RuntimeWarning"
pytestmark = [needs_kernels, pytest.mark.filterwarnings(OVERFLOW)]

#: Relative to the largest value. In bf16, `seg` rounds a product twice, and the interpreter
#: truncates where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}
OF_MLP = {torch.float32: 2e-6, torch.bfloat16: 0.04}  # two products, one after the other


def company(dtype: torch.dtype = torch.float32) -> list[Tenant]:
    """Return tenants of many ranks, with more than a tile of rows, one row or none. Some train half of the modules."""
    return [
        tenant(AdapterSpec(16, seed=1), ROWS + 9, dtype),
        tenant(AdapterSpec(1, seed=2), 1, dtype),
        tenant(AdapterSpec(64, seed=3, alpha=7.0), 33, dtype),
        tenant(AdapterSpec(8, seed=4), 0, dtype),
        tenant(AdapterSpec(5, seed=5, train_mlp=False), 40, dtype),
        tenant(AdapterSpec(24, seed=6, train_attn=False), 20, dtype),
    ]


@pytest.mark.parametrize("gate", [None, SILU, GELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_seg_for_any_ranks_and_targets(dtype: torch.dtype, gate: int | None) -> None:
    expected = work("seg", company(dtype), dtype=dtype, filler=7, gate=gate)
    found = work("fused", company(dtype), dtype=dtype, filler=7, gate=gate)

    for theirs, ours in zip(expected, found, strict=True):
        for name, difference in differences(ours, theirs).items():
            assert difference <= (OF_MLP if gate else TOLERANCE)[dtype], name


@pytest.mark.parametrize("gate", [None, SILU])
def test_tiles_copied_by_descriptors_have_the_same_bits(gate: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = work("fused", company(), filler=7, gate=gate)
    monkeypatch.setattr(operators, "copies_by_tma", lambda _operands: True)
    # Three programs share the tiles, as the multiprocessors of a GPU do.
    monkeypatch.setattr(operators, "programs_of", lambda tiles, _device: min(tiles, 3))

    found = work("fused", company(), filler=7, gate=gate)

    assert all(same(ours, theirs) for theirs, ours in zip(expected, found, strict=True))


@pytest.mark.parametrize("gate", [None, SILU])
@pytest.mark.parametrize("kind", ["int8", variant("fp8"), "nf4"])
def test_quantized_weights_have_the_bits_of_their_dequantized_values(kind: Quantization, gate: int | None) -> None:
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    expected = work("fused", company(), gate=gate, stored=lambda weight: QuantizedWeight(weight, kind).dense())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = work("fused", company(), gate=gate, stored=lambda weight: QuantizedWeight(weight, kind))

    assert all(same(ours, theirs) for theirs, ours in zip(expected, found, strict=True))
    assert saved
    assert not {(each.outputs, each.inputs) for each in lora_problem.TARGETS} & {tuple(each.shape) for each in saved}


@pytest.mark.parametrize("gate", [None, SILU])
def test_biases_are_added_to_the_modules_that_have_them(gate: int | None) -> None:
    tenants = company()[1:3]
    expected = work("seg", tenants, biased=True, gate=gate)
    found = work("fused", tenants, biased=True, gate=gate)

    for theirs, ours in zip(expected, found, strict=True):
        assert max(differences(ours, theirs).values()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("gate", [None, SILU])
def test_a_tenant_has_the_same_bits_alone_and_among_others(gate: int | None) -> None:
    tenants = company()
    together = work("fused", tenants, filler=5, gate=gate)

    for own, among in zip(tenants, together, strict=True):
        if own.rows:
            assert same(work("fused", [own], gate=gate)[0], among), own.spec


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("gate", [None, SILU])
def test_a_neighbour_with_nan_and_infinity_changes_no_bit(gate: int | None) -> None:
    tenants = company()[:3]
    clean = work("fused", tenants, gate=gate)
    failing = tenants[1]
    failing.weights.fill_(torch.nan)
    for values in (*failing.xs.values(), *failing.slopes.values()):
        values[:, ::2] = torch.inf

    found = work("fused", tenants, gate=gate)

    assert same(found[0], clean[0])
    assert same(found[2], clean[2])
    assert all(value.isnan().any() for value in found[1].values.values())


def test_two_segments_of_one_gradient_add_up_as_in_two_micro_batches() -> None:
    first = tenant(AdapterSpec(16, seed=1), 30)
    second = replace(first, xs=tenant(AdapterSpec(16, seed=8), 21).xs)
    second = replace(second, slopes=tenant(AdapterSpec(16, seed=8), 21).slopes)
    other = tenant(AdapterSpec(4, seed=2), 12)
    together, apart = torch.zeros_like(first.weights), torch.zeros_like(first.weights)

    work("fused", [first, other, second], grads={0: together, 2: together})
    for each in (first, second):
        work("fused", [each], grads={0: apart})

    assert together.abs().max() > 0
    assert torch.equal(together, apart)


def test_a_frozen_tenant_gets_no_gradient_and_changes_no_bit_of_others() -> None:
    tenants = company()[1:3]
    trained, found = work("fused", tenants), work("fused", tenants, frozen=[0])

    assert not found[0].values["gradient of its matrices"].any()
    name = "gradient of what 0.self_attn.q_proj reads"
    assert torch.equal(found[0].values[name], trained[0].values[name])
    assert same(found[1], trained[1])


def on_cuda() -> Any:
    """Return a stand-in for a weight on CUDA that lets the self-check run on the CPU."""
    return SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float32)


def corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*args: Any) -> Tables:
        tables = make_tables(*args)
        return replace(tables, scales=1.5 * tables.scales)

    monkeypatch.setattr(fused_lora, "make_tables", scaled)


def test_auto_on_cuda_is_fused_if_the_kernels_are_correct(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_backend("auto", TARGETS, on_cuda()).name == "fused"

    corrupt(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert find_backend("auto", TARGETS, on_cuda()).name == "seg"
    assert "LoRA is not fused with the base model's products" in caplog.text
    assert "differs from that of a loop" in caplog.text
    with pytest.raises(BackendUnfit, match="'fused' cannot be used: its output of"):
        find_backend("fused", TARGETS, torch.zeros(1))


def test_a_kernel_that_fails_to_run_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(fused_lora, "make_tables", fails)

    with pytest.raises(BackendUnfit, match="its kernels do not run: RuntimeError"):
        find_backend("fused", TARGETS, torch.zeros(1))


def test_the_self_check_finds_no_difference_in_bf16() -> None:
    assert disagreement(CPU, torch.bfloat16) is None
