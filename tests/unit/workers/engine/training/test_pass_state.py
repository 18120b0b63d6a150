from __future__ import annotations

import pytest
import torch

from cotrain_workers.engine.training.pass_state import is_all_finite

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [[INF], [-INF], [NAN], [INF, -INF]])
def test_one_value_that_is_not_finite_is_found(bad: list[float]) -> None:
    values = torch.ones(1000)
    values[500 : 500 + len(bad)] = torch.tensor(bad)

    assert not is_all_finite(values)


def test_values_whose_sum_is_not_finite_may_be() -> None:
    assert is_all_finite(torch.full((4,), 3e38))
    assert is_all_finite(torch.ones(4))
