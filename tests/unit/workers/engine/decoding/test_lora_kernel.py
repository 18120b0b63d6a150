"""LoRA of a decoder step in Triton's interpreter, compared with products in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import lora_kernel
from cotrain_workers.engine.decoding.lora_kernel import Siblings, add_lora, lora_kernel_is_right, lora_tables
from cotrain_workers.engine.decoding.slot_pool import Slot
from tests.support.lora_problem import needs_kernels
from tests.support.row_problem import CPU, GROUPS, TARGETS, added, expected, gap, operands, slots

pytestmark = [
    needs_kernels,
    # NumPy computes here, and warns of NaN. A GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
#: The sum of the base model's product and LoRA's is rounded once, and so are the low-rank values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def names(own: Siblings) -> str:
    return "+".join(target.name for target in own.targets)


def mixed(dtype: torch.dtype = torch.float32) -> list[Slot | None]:
    """Return rows without an adapter, generated tokens of three pools, and a prompt of two tiles and a half."""
    (low,), two, (high,) = slots(1, dtype=dtype), slots(16, 2, dtype=dtype, seed=1), slots(40, dtype=dtype, seed=2)
    return [None, low, *[two[0]] * 3, two[1], *[high] * 40, None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", GROUPS, ids=names)
def test_rows_of_mixed_ranks_and_pools_equal_plain_products(own: Siblings, dtype: torch.dtype) -> None:
    rows = mixed(dtype)
    x, ys = operands(own, len(rows), dtype)

    found = added(own, rows, x, ys)

    assert gap(found, expected(own, rows, x, ys)) < TOLERANCE[dtype]
    for y, before in zip(found, ys, strict=True):
        assert torch.equal(y[[0, -2, -1]], before[[0, -2, -1]])  # no adapter


def test_logits_stay_in_fp32() -> None:
    own, rows = GROUPS[-1], mixed(torch.bfloat16)
    x, ys = operands(own, len(rows), torch.bfloat16)
    logits = [ys[0].float()]

    found = added(own, rows, x, logits)

    assert found[0].dtype == torch.float32
    assert gap(found, expected(own, rows, x, logits)) < TOLERANCE[torch.bfloat16]


@pytest.fixture
def by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bits of a row of a product independent of its place, as on a GPU. NumPy's depend on it."""
    matmul = np.matmul

    def product(left: np.ndarray, right: np.ndarray, **settings: Any) -> np.ndarray:
        return np.stack([matmul(row, right, **settings) for row in left])

    monkeypatch.setattr(np, "matmul", product)


@pytest.mark.usefixtures("by_row")
@pytest.mark.parametrize("own", [GROUPS[0], GROUPS[2]], ids=names)
def test_bits_depend_on_the_row_and_its_adapter_alone(own: Siblings, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine,), (large,) = slots(12), slots(70, seed=3)
    x, ys = operands(own, 36)
    whole = added(own, [mine] * 36, x, ys)  # a prompt

    for row in (0, 17, 35):
        alone = added(own, [mine], x[row : row + 1], [y[row : row + 1] for y in ys])
        assert all(torch.equal(y[0], theirs[row]) for y, theirs in zip(alone, whole, strict=True))

    # Among others, in another slot of another pool, next to a larger rank, at another place of a tile.
    (moved,) = slots(12, spare=3)
    rows = [None, *[moved] * 20, *[large] * 15]
    found = added(own, rows, x, ys)
    assert all(torch.equal(y[1:21], theirs[1:21]) for y, theirs in zip(found, whole, strict=True))
    # In the grid of a graph, which has few programs, a longer table and a larger rank.
    monkeypatch.setattr(lora_kernel, "PROGRAMS", 3)
    tables = lora_tables(rows, CPU)
    table = torch.full((3, 37, 4), 2**30)
    table[:, : tables.tiles.shape[1]] = tables.tiles
    in_graph = [y.clone() for y in ys]
    add_lora(own, lora_kernel.LoraTables(table, [36] * 3, 128), x, in_graph)
    assert all(map(torch.equal, in_graph, found))


def test_a_broken_neighbour_changes_no_bit() -> None:
    own = GROUPS[0]
    (mine,), (broken,) = slots(12), slots(12, seed=1)
    broken.pool.flat.fill_(torch.nan)
    rows: list[Slot | None] = [mine, mine, broken, None]
    x, ys = operands(own, 4)
    alone = added(own, rows[:2], x[:2], [y[:2] for y in ys])
    x[2:] = torch.inf

    found = added(own, rows, x, ys)

    for y, theirs, before in zip(found, alone, ys, strict=True):
        assert torch.equal(y[:2], theirs)
        assert y[2].isnan().all()
        assert torch.equal(y[3], before[3])


def test_an_overflow_is_visible() -> None:
    own = GROUPS[3]
    (mine,) = slots(8)
    x, ys = operands(own, 2)
    x[1, 5] = torch.inf

    assert not added(own, [mine, mine], x, ys)[0][1].isfinite().any()


def test_modules_that_an_adapter_does_not_train_are_unchanged() -> None:
    only_mlp = frozenset(target.name for target in TARGETS if target.family == "mlp")
    (one,), (other,) = slots(8, names=only_mlp), slots(16)
    rows: list[Slot | None] = [one, one, other]
    tables = lora_tables(rows, CPU)
    assert tables.most == [1, 2, 1]

    for own in GROUPS:
        x, ys = operands(own, 3)
        found = added(own, rows, x, ys)
        assert gap(found, expected(own, rows, x, ys)) < 1e-5
        is_trained = own.targets[0].family == "mlp"
        assert all(torch.equal(y[:2], before[:2]) != is_trained for y, before in zip(found, ys, strict=True))


def test_a_step_without_adapters_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_kernel, "shrink", None)
    x, ys = operands(GROUPS[0], 2)

    assert all(map(torch.equal, added(GROUPS[0], [None, None], x, ys), ys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_accepts_the_kernels(dtype: torch.dtype) -> None:
    assert lora_kernel_is_right(TARGETS, CPU, dtype)
