from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cotrain_workers.engine.decoding.cuda_graphs import HostInputs

CPU = torch.device("cpu")
DUMP, PAGE, ROWS, PAGES = 99, 16, 4, 3


def row(position: int, pages: Sequence[int], token: int) -> Any:
    """Return a row for a token at a position, of the base model alone."""
    sequence = SimpleNamespace(token=lambda _: token)
    span = SimpleNamespace(start=position, pages=pages)
    return SimpleNamespace(work=SimpleNamespace(sequence=sequence), span=span, slot=None)


def test_fixed_inputs_keep_nothing_of_an_earlier_step() -> None:
    cache: Any = SimpleNamespace(page_tokens=PAGE, dump=DUMP)
    used, fresh = (HostInputs(ROWS, PAGES, [], cache, CPU) for _ in range(2))
    shared = [4, 5]
    used.fill([row(40, [1, 2, 3], 7), row(20, shared, 8), row(0, [6], 9)], [])
    shared[1] = 8  # in place, as when a shared page is copied

    step = [row(20, shared, 10), row(33, [1, 2, 9], 11)]
    for each in (used, fresh):
        each.fill(step, [])

    assert torch.equal(used.wide.on_device, fresh.wide.on_device)
    assert torch.equal(used.narrow.on_device, fresh.narrow.on_device)
    ids, positions, kv_slots = used.wide.on_device.view(3, ROWS).tolist()
    assert (ids, positions) == ([10, 11, 0, 0], [20, 33, 0, 0])
    assert kv_slots == [8 * PAGE + 4, 9 * PAGE + 1, DUMP * PAGE, DUMP * PAGE + 1]
    lengths, blocks = used.narrow.on_device.split_with_sizes(used.cuts)
    assert lengths.tolist() == [21, 34, 1, 1]
    none = [DUMP] * PAGES
    assert blocks.view(ROWS, PAGES).tolist() == [[4, 8, DUMP], [1, 2, 9], none, none]
