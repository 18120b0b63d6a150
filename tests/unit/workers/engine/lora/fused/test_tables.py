"""Lookup tables of the fused kernels. No kernel runs here."""

from __future__ import annotations

from dataclasses import replace

import torch

from cotrain_workers.engine.lora.fused.tables import HEAD, ROWS, find_owners, find_tiles, make_tables, plan_groups
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.lora_problem import CPU, TARGETS, tenant

GROUPS = plan_groups(TARGETS)


def segments() -> list[Segment]:
    found, start = [], 0
    for spec in (AdapterSpec(5, seed=1), AdapterSpec(24, seed=2, train_mlp=False)):
        own = tenant(spec, 10)
        grads = own.layout.views(torch.zeros_like(own.weights))
        found.append(Segment(start, start + own.rows, own, spec.scale, grads))
        start += own.rows
    return found


def test_modules_that_read_the_same_input_are_one_group() -> None:
    assert [len(group.names) for group in GROUPS] == [3, 2, 1]
    assert all(group.at % 2 == 0 for group in GROUPS)  # each begins at a multiple of 16 bytes


def test_tiles_cover_every_row_once_and_start_with_a_segment() -> None:
    tiles = find_tiles([(0, ROWS + 3), (ROWS + 3, ROWS + 3), (ROWS + 8, ROWS + 20)], 2 * ROWS)

    assert tiles == [
        (0, 0, ROWS + 3),
        (0, ROWS, ROWS + 3),
        (3, ROWS + 3, ROWS + 8),  # without an adapter
        (2, ROWS + 8, ROWS + 20),
        (3, ROWS + 20, 2 * ROWS),
    ]
    rows = [row for _, first, stop in tiles for row in range(first, min(stop, first + ROWS))]
    assert rows == list(range(2 * ROWS))


def test_segments_of_one_gradient_have_one_owner_and_keep_their_order() -> None:
    first, second = segments()
    frozen = replace(second, grads=None)

    assert find_owners([first, second, frozen, replace(first, start=20, stop=30)]) == ([0, 2, 3], [0, 3, 1])
    assert find_owners([frozen]) == ([0], [])


def test_entries_have_the_address_of_each_matrix() -> None:
    own = segments()
    tables = make_tables(own, 24, GROUPS, CPU)
    attn, mlp = tables.of(GROUPS[0]), tables.of(GROUPS[1])

    assert attn[:, 0].tolist() == [5, 24, 0]
    assert mlp[:, 0].tolist() == [5, 0, 0]  # the second does not train it, and the last has no adapter
    for entry, segment in zip(attn.tolist(), own, strict=False):
        assert segment.grads is not None
        for at, name in enumerate(GROUPS[0].names):
            for side in (0, 1):
                offset = 4 * entry[HEAD + 2 * at + side]
                assert entry[1] + offset == segment.source.compute[name][side].data_ptr()
                assert entry[2] + offset == segment.grads[name][side].data_ptr()


def test_the_number_of_columns_follows_the_largest_rank() -> None:
    tables = make_tables(segments(), 24, GROUPS, CPU)

    assert [tables.columns(group) for group in GROUPS] == [80, 16, 16]  # 3 * 24, 2 * 5, 5
