from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from cotrain_workers.head import Head, HeadInput
from cotrain_workers.losses import LOSSES, LossSpec, value_and_slope
from cotrain_workers.route import Part
from cotrain_workers.spec import Pair

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


def dense(
    s: Setting, loss: LossSpec, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
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
    ("name", "columns"), [("cross_entropy", 1), ("cross_entropy", 3), ("ppo", 1), ("gspo", 1)]
)
def test_the_chunked_head_equals_the_dense_one(
    name: str, columns: int, chunk_rows: int, softcap: float | None
) -> None:
    s, loss = setting(columns), LOSSES[name]
    grads = Pair(torch.zeros_like(s.lora.a), torch.zeros_like(s.lora.b))
    given = HeadInput(
        hidden=s.hidden,
        targets=s.targets,
        inputs=s.inputs,
        datum_lengths=LENGTHS,
        loss=loss,
        config=loss.defaults,
        part=Part(0, ROWS, s.lora, SCALE, grads),
        hidden_grad=torch.zeros_like(s.hidden),
    )
    head = Head(s.weight, softcap, chunk_rows)

    result = head.run(given)

    logprobs, total, (hidden_grad, a_grad, b_grad) = dense(s, loss, softcap)
    assert_close(result.found, logprobs.detach())
    assert_close(result.loss, total)
    assert given.hidden_grad is not None
    assert_close(given.hidden_grad, hidden_grad)
    assert_close(grads.a, a_grad)
    assert_close(grads.b, b_grad)

    forward_only = head.run(replace(given, hidden_grad=None))
    assert torch.equal(forward_only.found, result.found)
    assert torch.equal(forward_only.loss, result.loss)


def test_no_tensor_of_all_rows_times_the_vocabulary_exists() -> None:
    rows, vocab, chunk_rows = 512, 2048, 32
    weight, hidden = torch.randn(vocab, 8), torch.randn(rows, 8)
    given = HeadInput(
        hidden=hidden,
        targets=torch.zeros(rows, 1, dtype=torch.int64),
        inputs={"weights": torch.ones(rows, 1)},
        datum_lengths=[rows],
        loss=LOSSES["cross_entropy"],
        config={},
        part=None,
        hidden_grad=torch.zeros_like(hidden),
    )

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        Head(weight, None, chunk_rows).run(given)

    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * chunk_rows * vocab * 4 < rows * vocab * 4
