"""Two-pass softmax of the head in Triton's interpreter, compared with PyTorch's operations."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
import torch

from cotrain_workers.engine.model import layer_kernels
from cotrain_workers.engine.model.layer_kernels import KernelSoftmax, find_softmax
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax
from cotrain_workers.engine.routing import Part
from cotrain_workers.engine.spec import Pair
from cotrain_workers.engine.training.heads import Head, HeadInput
from cotrain_workers.engine.training.losses import LOSSES
from tests.support.lora_problem import needs_kernels

pytestmark = needs_kernels

VOCAB = 97  # a prime, so no multiple of a block
TYPES = [(torch.float32, 2e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide a row into four blocks of columns, the last one partial."""
    monkeypatch.setattr(layer_kernels, "COLUMNS", 32)


class Rows(NamedTuple):
    """Logits, targets (possibly the same one twice in a row), and d loss / d logprob."""

    logits: torch.Tensor
    targets: torch.Tensor
    slopes: torch.Tensor


def problem(columns: int, rows: int = 6) -> Rows:
    g = torch.Generator().manual_seed(columns)
    logits = 5 * torch.randn(rows, VOCAB, generator=g)
    logits[0] += 40  # an offset of the logits does not change a softmax
    logits[5] -= 200
    targets = torch.randint(0, VOCAB, (rows, columns), generator=g)
    targets[1] = VOCAB - 1
    return Rows(logits, targets, torch.randn(rows, columns, generator=g))


def through(
    new: NewSoftmax, given: Rows, softcap: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and gradients, computed in two slices of the rows."""
    softmax = new(given.logits.clone(), softcap, dtype, goes_back=True)
    logprobs = []
    for rows in (slice(0, 2), slice(2, len(given.logits))):
        logprobs.append(softmax.logprobs(rows, given.targets[rows]))
        softmax.go_back(rows, given.targets[rows], given.slopes[rows])
    return torch.cat(logprobs), softmax.gradient()


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), TYPES)
def test_the_kernel_softmax_equals_that_of_pytorch(
    dtype: torch.dtype, most: float, columns: int, softcap: float | None
) -> None:
    given = problem(columns)

    ours, theirs = (through(each, given, softcap, dtype) for each in (KernelSoftmax, PlainSoftmax))

    assert off(ours[0], theirs[0]) <= 2e-6  # fp32 for every type of weights
    assert ours[1].dtype == dtype
    assert off(ours[1], theirs[1]) <= most


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_kernel_softmax_equals_that_of_pytorch_in_fp64(softcap: float | None) -> None:
    given = problem(2)
    wide = Rows(given.logits.double(), given.targets, given.slopes.double())
    exact = through(PlainSoftmax, wide, softcap, torch.float64)

    found = through(KernelSoftmax, given, softcap, torch.float32)

    assert off(found[0], exact[0]) <= 2e-6
    assert off(found[1], exact[1]) <= 2e-6


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_row_has_the_same_bits_alone_and_among_others(softcap: float | None) -> None:
    given = problem(2)
    alone = through(KernelSoftmax, Rows(*(e[3:4].clone() for e in given)), softcap, torch.float32)
    given.logits[2, 5], given.logits[4] = torch.nan, torch.inf

    found = through(KernelSoftmax, given, softcap, torch.float32)

    assert torch.equal(found[0][3:4], alone[0])
    assert torch.equal(found[1][3:4], alone[1])
    assert found[0][2].isnan().all()  # the NaN shows in its own row
    assert found[1][2].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_of_minus_infinity_have_no_probability() -> None:
    given = problem(1)
    given.logits[0, :64] = -torch.inf  # whole blocks, including the first
    given.targets[0] = 70

    ours, theirs = (through(each, given, None, torch.float32) for each in (KernelSoftmax, PlainSoftmax))

    assert off(ours[0], theirs[0]) <= 2e-6
    assert off(ours[1], theirs[1]) <= 2e-6
    assert not ours[1][0, :64].any()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_rows", [32, 1024])
def test_the_head_has_the_same_results_with_and_without_the_kernel(chunk_rows: int, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(80, 64, generator=g) / 8, torch.randn(VOCAB, 64, generator=g)
    results = []
    for new in (KernelSoftmax, PlainSoftmax):
        slices = [slice_of_op(0, 2, "ppo", 1), slice_of_op(8, 14, "cross_entropy", 3)]
        slices += [slice_of_op(24, 38, "gspo", 1), slice_of_op(70, 5, "dro", 1, needs_grad=False)]
        hidden_grad = torch.zeros_like(hidden)
        head = Head(weight, softcap, chunk_rows, new)
        answers = head.run([given for given, _ in slices], hidden, hidden_grad)
        found = [each for answer in answers for each in (answer.found, answer.loss)]
        results.append([*found, hidden_grad, *(each for _, grads in slices[:3] for each in grads)])

    for ours, theirs in zip(*results, strict=True):
        assert theirs.any()
        assert off(ours, theirs) <= 2e-6


def slice_of_op(start: int, length: int, name: str, columns: int, *, needs_grad: bool = True) -> tuple[HeadInput, Pair]:
    """Return a slice of random targets, and the buffers of its LoRA gradients."""
    g = torch.Generator().manual_seed(start)
    pair = Pair(torch.randn(4, 64, generator=g) / 8, torch.randn(VOCAB, 4, generator=g) / 8)
    grads = Pair(torch.zeros_like(pair.a), torch.zeros_like(pair.b))
    loss = LOSSES[name]
    given = HeadInput(
        start,
        needs_grad,
        torch.randint(0, VOCAB, (length, columns), generator=g),
        {each: torch.randn(length, columns, generator=g) for each in loss.inputs},
        [length - 1, 1],
        loss,
        loss.defaults,
        Part(start, start + length, pair, 2.0, grads),
    )
    return given, grads


def test_kernels_with_wrong_results_or_errors_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(VOCAB, 8)
    assert find_softmax(weight, None) is KernelSoftmax
    assert find_softmax(weight.bfloat16(), 30.0) is KernelSoftmax

    monkeypatch.setattr(KernelSoftmax, "gradient", lambda own: 1.01 * own._grads)
    with caplog.at_level(logging.ERROR):
        assert find_softmax(weight, None) is PlainSoftmax
    assert "is off by 0.01" in caplog.text

    def broken(*_: object) -> None:
        raise RuntimeError("no assembler")

    monkeypatch.setattr(KernelSoftmax, "gradient", broken)
    assert find_softmax(weight, None) is PlainSoftmax
