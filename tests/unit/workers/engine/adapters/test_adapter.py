from __future__ import annotations

import math

import pytest
import torch

from cotrain_workers.engine.adapters.adapter import Gradient, discard_all, is_all_finite
from cotrain_workers.engine.lora.segmented import add_product
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, kept_share, plan_layout

INF, NAN = float("inf"), float("nan")

TARGETS = (Target("q_proj", "attn", 24, 20), Target("v_proj", "attn", 24, 40))


def layout() -> Layout:
    return plan_layout(AdapterSpec(5, seed=0), TARGETS)


def full_of(value: float, dtype: torch.dtype = torch.float32) -> Gradient:
    gradient = Gradient(torch.zeros(layout().size, dtype=dtype), layout())
    for sums in gradient.views.values():
        sums.a.fill_(value)
        sums.b.fill_(value)
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_overwrite_a_discarded_gradient(dtype: torch.dtype) -> None:
    gradient, fresh = full_of(math.nan), full_of(0.0)
    discard_all([gradient])
    left, right = (torch.randn(5, 3).to(dtype), torch.randn(3, 24).to(dtype))

    for each in (gradient, fresh):
        sums = each.views["q_proj"]
        for _ in range(2):
            share = kept_share(sums)
            add_product(sums.a, left, right, 2.0, share)
            add_product(sums.b, left[:, :1].t().expand(20, 5), left @ left.t(), 2.0, share)
            assert kept_share(sums) == 1

    assert fresh.views["q_proj"].b.any()
    assert torch.equal(gradient.flat, fresh.flat)  # the other module got no product


def test_a_discarded_gradient_counts_as_zeros() -> None:
    gradients = [full_of(math.inf) for _ in range(4)]
    discard_all(gradients[1:])

    assert gradients[0].norm() == math.inf
    assert not gradients[1].flat.any()
    assert gradients[2].norm() == 0
    assert gradients[2].is_finite()
    gradients[3].settle()
    assert [kept_share(sums) for sums in gradients[3].views.values()] == [1, 1]
    assert not gradients[3].views["v_proj"].b.any()


def test_a_norm_includes_later_writes() -> None:
    gradient = full_of(1.0)
    before = gradient.norm()

    gradient.flat.mul_(2)
    assert gradient.norm() == 2 * before
    gradient.views["q_proj"].a.fill_(math.nan)
    assert not gradient.is_finite()
    gradient.discard_unless(torch.tensor(True))
    assert gradient.norm().isnan()
    gradient.discard_unless(torch.tensor(False))
    assert gradient.norm() == 0


def test_a_norm_is_summed_in_fp64() -> None:
    gradient = full_of(0.0)
    generator = torch.Generator().manual_seed(1)
    gradient.flat.copy_(torch.randn(layout().size, generator=generator))

    assert gradient.norm() == float(gradient.flat.double().norm())
    assert gradient.norm() != float(gradient.flat.norm())


def test_finite_fp64_values_may_have_an_infinite_norm() -> None:
    gradient = full_of(1e200, torch.float64)

    assert gradient.is_finite()
    assert gradient.norm() == math.inf


def test_a_pair_outside_of_gradients_is_never_discarded() -> None:
    assert kept_share(Pair(torch.ones(1, 1), torch.ones(1, 1))) == 1


@pytest.mark.parametrize("bad", [[INF], [-INF], [NAN], [INF, -INF]])
def test_a_single_non_finite_value_is_found(bad: list[float]) -> None:
    values = torch.ones(1000)
    values[500 : 500 + len(bad)] = torch.tensor(bad)

    assert not is_all_finite(values)


def test_finite_values_may_have_a_non_finite_sum() -> None:
    assert is_all_finite(torch.full((4,), 3e38))
    assert is_all_finite(torch.ones(4))
