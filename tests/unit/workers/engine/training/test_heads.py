"""Log-probabilities and gradients of the head, against the same formula over all rows at once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cotrain_workers.engine.model import unembedding as projection
from cotrain_workers.engine.routing import Part
from cotrain_workers.engine.spec import Pair
from cotrain_workers.engine.training import heads
from cotrain_workers.engine.training.heads import Head, HeadInput
from cotrain_workers.engine.training.losses import LOSSES, LossSpec, value_and_slope

ROWS, WIDTH, VOCAB, RANK, SCALE = 23, 16, 64, 4, 2.0
LENGTHS = (9, 1, 13)


class Setting(NamedTuple):
    weight: torch.Tensor
    hidden: torch.Tensor
    targets: torch.Tensor
    inputs: dict[str, torch.Tensor]
    lora: Pair


def setting(columns: int, *, seed: int = 0) -> Setting:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {
        "weights": normal(ROWS, columns),
        "logprobs": normal(ROWS, columns) - 4,
        "advantages": normal(ROWS, columns),
        "sequence_ratio_mask": torch.ones(ROWS, columns, dtype=torch.float64),
    }
    # a small range, so that a row names the same token in two columns
    targets = torch.randint(0, 8, (ROWS, columns), generator=g)
    lora = Pair(normal(RANK, WIDTH), normal(VOCAB, RANK))
    return Setting(normal(VOCAB, WIDTH), normal(ROWS, WIDTH), targets, inputs, lora)


def dense(s: Setting, loss: LossSpec, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return log-probabilities, the summed loss and the gradients of hidden, A and B, by autograd."""
    hidden, a, b = (x.clone().requires_grad_() for x in (s.hidden, *s.lora))
    logits = hidden @ s.weight.t() + SCALE * (hidden @ a.t()) @ b.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits, -1).gather(1, s.targets)
    total = torch.zeros((), dtype=torch.float64)
    slope = torch.empty_like(logprobs)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        inputs = {name: values[rows] for name, values in s.inputs.items()}
        part, slope[rows] = value_and_slope(loss, logprobs[rows], inputs, loss.defaults)
        total, start = total + part, start + length
    return logprobs, total, list(torch.autograd.grad(logprobs, (hidden, a, b), slope))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_rows", [4, 1024])
@pytest.mark.parametrize(
    ("name", "columns"), [("cross_entropy", 1), ("cross_entropy", 3), ("ppo", 1), ("gspo", 1), ("gspo", 3)]
)
def test_the_chunked_head_equals_the_dense_one(name: str, columns: int, chunk_rows: int, softcap: float | None) -> None:
    s, loss = setting(columns), LOSSES[name]
    grads = Pair(torch.zeros_like(s.lora.a), torch.zeros_like(s.lora.b))
    hidden_grad = torch.zeros_like(s.hidden)
    given = HeadInput(
        start=0,
        needs_grad=True,
        targets=s.targets,
        inputs=s.inputs,
        datum_lengths=LENGTHS,
        loss=loss,
        config=loss.defaults,
        part=Part(0, ROWS, s.lora, SCALE, grads),
    )
    head = Head(s.weight, softcap, chunk_rows)

    (result,) = head.run([given], s.hidden, hidden_grad)

    logprobs, total, (expected, a_grad, b_grad) = dense(s, loss, softcap)
    assert_close(result.found, logprobs.detach())
    assert_close(result.loss, total)
    assert_close(hidden_grad, expected)
    assert_close(grads.a, a_grad)
    assert_close(grads.b, b_grad)

    (forward_only,) = head.run([replace(given, needs_grad=False)], s.hidden, torch.empty(0))
    assert torch.equal(forward_only.found, result.found)
    assert torch.equal(forward_only.loss, result.loss)


def test_no_tensor_has_all_rows_times_the_vocabulary() -> None:
    rows, vocab, chunk_rows = 512, 2048, 32
    weight, hidden = torch.randn(vocab, 8), torch.randn(rows, 8)
    given = HeadInput(
        start=0,
        needs_grad=True,
        targets=torch.zeros(rows, 1, dtype=torch.int64),
        inputs={"weights": torch.ones(rows, 1)},
        datum_lengths=[rows],
        loss=LOSSES["cross_entropy"],
        config={},
        part=None,
    )

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Head(weight, None, chunk_rows).run([given], hidden, torch.zeros_like(hidden))

    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * chunk_rows * vocab * 4 < rows * vocab * 4


def slice_of_op(start: int, length: int, name: str, *, needs_grad: bool) -> tuple[HeadInput, Pair]:
    """Return a slice of random targets, and the buffers of its LoRA gradients."""
    g = torch.Generator().manual_seed(start)
    pair = Pair(torch.randn(RANK, 64, generator=g) / 8, torch.randn(VOCAB, RANK, generator=g) / 8)
    grads = Pair(torch.zeros_like(pair.a), torch.zeros_like(pair.b))
    inputs = {
        name: torch.randn(length, 1, generator=g)
        for name in ("weights", "logprobs", "advantages", "sequence_ratio_mask")
    }
    targets = torch.randint(0, VOCAB, (length, 1), generator=g)
    loss, part = LOSSES[name], Part(start, start + length, pair, SCALE, grads)
    given = HeadInput(start, needs_grad, targets, inputs, [length - 1, 1], loss, loss.defaults, part)
    return given, grads


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_rows", [32, 64, 1024])
def test_slices_that_share_a_product_have_the_bits_they_have_alone(chunk_rows: int, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(320, 64, generator=g) / 8, torch.randn(VOCAB, 64, generator=g)
    sizes = [(0, 2, "ppo"), (8, 40, "cross_entropy"), (48, 70, "gspo"), (130, 9, "gspo")]
    head, results = Head(weight, softcap, chunk_rows), []
    for companies in ([sizes], [[each] for each in sizes]):
        hidden_grad = torch.zeros_like(hidden)
        found = []
        for company in companies:
            op_slices = [slice_of_op(*each, needs_grad=each[0] != 8) for each in company]
            answers = head.run([given for given, _ in op_slices], hidden, hidden_grad)
            for (_, grads), answer in zip(op_slices, answers, strict=True):
                found += [answer.found, answer.loss, *grads]
        results.append([*found, hidden_grad])

    together, alone = results
    assert all(map(torch.equal, together, alone))
    assert together[-1][48:118].any()
    assert not together[-1][8:48].any()


def test_neighbours_share_one_product_with_the_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    products, real = [], projection.raw_logits

    def counted(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products.append(len(hidden))
        return real(hidden, weight)

    monkeypatch.setattr(heads, "raw_logits", counted)
    hidden, weight = torch.randn(320, 64), torch.randn(VOCAB, 64)
    op_slices = [slice_of_op(start, 8, "ppo", needs_grad=True)[0] for start in range(0, 320, 16)]
    Head(weight, None, 1024).run(op_slices[:1], hidden, torch.zeros_like(hidden))
    assert products == [32]  # rows of one slice, and filler: fewer rows would have other bits

    touching = [slice_of_op(start, 5, "ppo", needs_grad=True)[0] for start in range(0, 320, 8)]
    Head(weight, None, 128).run(touching, hidden, torch.zeros_like(hidden))
    assert products[1:] == [125, 125, 61]
