from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.next_tokens import DrawParams, choose, uniform

VOCAB = 50


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(row: torch.Tensor, *, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> np.ndarray:
    """Return the frequencies of the tokens drawn with 20,000 evenly spread numbers."""
    count = 20_000
    choices = [DrawParams(temperature, top_k, top_p, (at + 0.5) / count) for at in range(count)]
    tokens = choose(row.expand(count, -1), choices)
    return torch.bincount(tokens, minlength=VOCAB).numpy() / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    row = logits(1)[0]

    expected = torch.softmax(row / temperature, -1).numpy()
    np.testing.assert_allclose(drawn(row, temperature=temperature), expected, atol=1e-4)


def test_top_k_keeps_the_k_most_probable() -> None:
    row = logits(1)[0]
    kept = row.topk(5).indices

    expected = torch.zeros(VOCAB)
    expected[kept] = torch.softmax(row[kept], -1)
    np.testing.assert_allclose(drawn(row, top_k=5), expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float) -> None:
    row = logits(1)[0]
    probabilities = torch.softmax(row, -1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept = order[before < top_p]

    expected = torch.zeros(VOCAB)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    np.testing.assert_allclose(drawn(row, top_p=top_p), expected.numpy(), atol=1e-4)


def test_top_p_applies_after_top_k() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    row = torch.cat([row, torch.full((VOCAB - 4,), -50.0)])

    # within (0.4, 0.3) the first has 57 %
    assert set(np.flatnonzero(drawn(row, top_k=2, top_p=0.5))) == {0}
    assert set(np.flatnonzero(drawn(row, top_p=0.5))) == {0, 1}


def test_equally_probable_tokens_are_kept_or_dropped_together() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, *[-9.0] * 46])

    assert set(np.flatnonzero(drawn(row, top_k=2))) == {1, 2, 3}


def test_greedy_chooses_the_lowest_of_equal_tokens() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 0.0]])

    assert choose(row, [DrawParams(0.0, -1, 1.0, 0.99)]).tolist() == [1]


@pytest.mark.parametrize("point", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_a_possible_token(point: float) -> None:
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, 7] = 0.0

    assert choose(row, [DrawParams(1.0, -1, 1.0, point)]).tolist() == [7]


@pytest.mark.parametrize("temperature", [1e-38, 1e-310, 5e-324])
def test_a_tiny_temperature_draws_the_most_probable_token(temperature: float) -> None:
    choice = DrawParams(temperature, -1, 0.9, 0.5)
    assert choose(logits(1), [choice]).tolist() == [int(logits(1).argmax())]


def test_a_row_is_sampled_as_if_it_were_alone() -> None:
    rows = logits(200)
    rng = np.random.default_rng(0)
    choices = [
        DrawParams(
            float(rng.choice([0.0, 0.5, 1.0])),
            int(rng.choice([-1, 3, 20])),
            float(rng.choice([1.0, 0.7])),
            float(rng.random()),
        )
        for _ in range(200)
    ]

    together = choose(rows, choices)

    for at in range(200):
        assert choose(rows[at : at + 1], choices[at : at + 1]) == together[at]


def test_uniform_numbers_depend_on_each_of_their_keys() -> None:
    numbers = [uniform(seed, seq, token) for seed in range(9) for seq in range(9) for token in range(9)]

    assert len(set(numbers)) == 729
    assert all(0 <= number < 1 for number in numbers)
    assert abs(float(np.mean(numbers)) - 0.5) < 0.05
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
