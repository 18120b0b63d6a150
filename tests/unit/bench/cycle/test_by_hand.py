from __future__ import annotations

import pytest
import torch

from bench.cycle.peft import as_torch_comes


def test_peft_is_timed_without_our_slower_kernels_which_are_restored() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise torch.OutOfMemoryError

    torch.use_deterministic_algorithms(mode=True)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            as_torch_comes(work)()

        assert seen == [False]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)
