from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrain_workers.engine.transfer import to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize("source", [np.arange(4.0), torch.arange(4.0)])
def test_values_arrive_in_their_own_type_or_the_one_asked_for(source: np.ndarray) -> None:
    assert to_device(source, CPU).tolist() == [0, 1, 2, 3]
    assert to_device(np.arange(4), CPU).dtype == torch.int64
    assert to_device(source, CPU, torch.bfloat16).dtype == torch.bfloat16


def test_a_device_reads_pinned_memory_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return self

    def move(self: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        calls.append((args, settings))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", move)

    to_device(np.arange(4), torch.device("cuda", 0))

    assert calls[:2] == ["pin", ((torch.device("cuda", 0),), {"non_blocking": True})]
