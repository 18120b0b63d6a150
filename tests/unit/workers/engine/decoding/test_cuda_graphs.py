from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cotrain_workers.engine.decoding.cuda_graphs import Inputs

CPU = torch.device("cpu")
DUMP, PAGE, ROWS, PAGES = 99, 16, 4, 3


def row(position: int, pages: Sequence[int], token: int) -> Any:
    """Return a row for a token at a position, of the base model alone."""
    sequence = SimpleNamespace(token=lambda _: token)
    span = SimpleNamespace(start=position, pages=pages)
    return SimpleNamespace(work=SimpleNamespace(sequence=sequence), span=span, slot=None)


def test_fixed_inputs_keep_nothing_of_an_earlier_step() -> None:
    cache: Any = SimpleNamespace(page_tokens=PAGE, dump=DUMP, device=CPU)
    used, fresh = (Inputs(ROWS, PAGES, [], cache) for _ in range(2))
    shared = [4, 5]
    used.fill([row(40, [1, 2, 3], 7), row(20, shared, 8), row(0, [6], 9)], [], None)
    shared[1] = 8  # in place, as when a shared page is copied

    step = [row(20, shared, 10), row(33, [1, 2, 9], 11)]
    for each in (used, fresh):
        each.fill(step, [], None)

    for of_used, of_fresh in (
        (used.ids, fresh.ids),
        (used.positions, fresh.positions),
        (used.tables.kv_slots, fresh.tables.kv_slots),
        (used.tables.pages, fresh.tables.pages),
    ):
        assert torch.equal(of_used, of_fresh)
    assert used.ids.tolist() == [[10, 11, 0, 0]]
    assert used.positions.tolist() == [[20, 33, 0, 0]]
    assert used.tables.kv_slots.tolist() == [8 * PAGE + 4, 9 * PAGE + 1, DUMP * PAGE, DUMP * PAGE + 1]
    (blocks,) = used.tables.launches
    assert blocks.lengths.tolist() == [21, 34, 1, 1]
    none = [DUMP] * PAGES
    assert used.tables.pages.tolist() == [[4, 8, DUMP], [1, 2, 9], none, none]
