from __future__ import annotations

import pytest
import torch

from bench.support.model import SHAPES
from bench.support.roofline import Rates, adapter_bytes, adapter_parameters, ceiling, flops_per_token

RANK = 16
H200 = 788e12  # dense bf16 FLOP/s


# Calculated separately by hand, without LoRA on the head, which is 0.2 to 0.6 % of a token.
@pytest.mark.parametrize(
    ("size", "length", "plain", "recomputed"),
    [
        ("0.6b", 2048, 241e3, 179e3),
        ("4b", 512, 46.9e3, 32.4e3),
        ("8b", 512, 25.4e3, 17.4e3),
        ("8b", 2048, 24.1e3, 16.7e3),
        ("8b", 8192, 20.2e3, 14.2e3),
    ],
)
def test_the_ceiling_of_a_gpu_follows_from_its_peak_rates(
    size: str, length: int, plain: float, recomputed: float
) -> None:
    shape = SHAPES[size]

    assert pytest.approx(plain, rel=0.02) == H200 / flops_per_token(shape, length, RANK)
    again = flops_per_token(shape, length, RANK, recompute=True)
    assert pytest.approx(recomputed, rel=0.02) == H200 / again


def test_an_adapter_of_rank_16_on_all_linears_of_8b_needs_786_megabytes() -> None:
    parameters = adapter_parameters(SHAPES["8b"], RANK, unembed=False)

    assert parameters == 43_646_976
    assert pytest.approx(786e6, rel=0.001) == 18 * parameters
    with_head = parameters + RANK * (4096 + 151_936)
    assert adapter_bytes(SHAPES["8b"], RANK, torch.bfloat16) == 18 * with_head


def test_an_adapter_on_a_wide_base_needs_no_copy() -> None:
    parameters = adapter_parameters(SHAPES["small"], RANK)

    assert adapter_bytes(SHAPES["small"], RANK, torch.float32) == 16 * parameters


def test_the_ceiling_includes_a_step_of_every_adapter() -> None:
    shape, rates = SHAPES["small"], Rates(matmul_flops=1e30, copy_bytes=28.0)
    parameters = adapter_parameters(shape, RANK)

    for adapters in (1, 64):
        # Computation costs nothing here, and one parameter is stepped per second.
        possible = ceiling(shape, 64, RANK, rates, adapters=adapters, tokens=4096)
        assert possible == pytest.approx(4096 / (adapters * parameters))
