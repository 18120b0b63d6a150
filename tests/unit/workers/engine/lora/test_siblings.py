from __future__ import annotations

import pytest
import torch

from cotrain_workers.engine.lora.siblings import SiblingResults


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_the_first_sibling_computes_for_all_views_of_the_same_rows(mode: type[torch.no_grad]) -> None:
    """A shared expert gets rows `[T, d]`, of which each of its modules makes a view `[1, T, d]`."""
    results, calls = SiblingResults[str](), list[str]()

    def compute() -> dict[str, str]:
        calls.append("both")
        return {"gate": "g", "up": "u"}

    with mode():
        x = torch.zeros(6, 4)
        assert results.take("gate", x.reshape(1, -1, 4), compute) == "g"
        assert results.take("up", x.reshape(1, -1, 4), compute) == "u"
        assert len(calls) == 1

        results.take("gate", x, compute)
        for other in (torch.zeros(6, 4), x[:3], x[3:]):
            results.take("up", other, compute)
            results.take("gate", x, compute)
    assert len(calls) == 1 + 1 + 2 * 3
