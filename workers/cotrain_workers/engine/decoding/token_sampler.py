"""Sampling of the next token of each row: temperature, top-k, top-p, and one uniform number per token.

The draw inverts the cumulative distribution in integers, whose sums are exact in any order. The result is
therefore equal on CPU and with CUDA's deterministic algorithms (which lack a cumulative sum of floats), in any batch.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cotrain_workers.engine.device import to_device, unordered_writes

UNIT = 2.0**40  # probability 1; probabilities below 1 / UNIT are never drawn
ROWS = 64  # per call: the cumulative sums of a row take 8 bytes per token of the vocabulary


class Choice(NamedTuple):
    """Sampling parameters of the next token of one row."""

    temperature: float  # 0: the most probable token, the lowest id among equals
    top_k: int  # below 1: off
    top_p: float
    uniform: float  # in [0, 1)


def uniform(seed: int, sequence: int, token: int) -> float:
    """Return the uniform number of one token, derived only from its three arguments."""
    name = f"{seed}:{sequence}:{token}".encode()
    bits = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Return a token for each of the first rows of `logits` `[>= len(choices), V]`: int64 `[n]`."""
    parts = [
        choose_some(logits[start : start + ROWS], choices[start : start + ROWS])
        for start in range(0, len(choices), ROWS)
    ]
    return torch.cat(parts)


def choose_some(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    """Return the tokens of at most `ROWS` rows."""
    likeliest = logits[: len(choices)].argmax(dim=-1)
    drawn = [at for at, choice in enumerate(choices) if choice.temperature > 0]
    if not drawn:
        return likeliest
    device = logits.device
    rows = to_device(torch.tensor(drawn), device)
    wanted = [choices[at] for at in drawn]
    temperatures = to_device(torch.tensor([c.temperature for c in wanted], dtype=logits.dtype), device)
    temperatures.clamp_(min=torch.finfo(logits.dtype).tiny)  # a value rounded to 0 would give 0 / 0
    some = logits.index_select(0, rows)
    scaled = (some - some.amax(dim=-1, keepdim=True)) / temperatures[:, None]  # at most 0: no overflow
    weights = (torch.softmax(scaled, dim=-1) * UNIT).long()  # [rows, V]
    keep_most_probable(weights, wanted)
    uniforms = to_device(torch.tensor([c.uniform for c in wanted], dtype=torch.float64), device)
    found = draw(weights, uniforms)
    with unordered_writes():
        return likeliest.index_copy_(0, rows, found)


def keep_most_probable(weights: torch.Tensor, choices: Sequence[Choice]) -> None:
    """Zero `weights` `[rows, V]` excluded by top_k, then by top_p; equal weights are treated alike."""
    for k in {choice.top_k for choice in choices if 0 < choice.top_k < weights.shape[1]}:
        rows = matching(weights, [choice.top_k == k for choice in choices])
        some = weights.index_select(0, rows)
        least = some.topk(k, dim=-1).values[:, -1:]
        with unordered_writes():
            weights.index_copy_(0, rows, some.where(some >= least, 0))
    narrow = [choice.top_p < 1 for choice in choices]
    if any(narrow):
        rows = matching(weights, narrow)
        given = torch.tensor([choice.top_p for choice in choices if choice.top_p < 1])
        shares = to_device(given, weights.device).double()
        kept = nucleus(weights.index_select(0, rows), shares)
        with unordered_writes():
            weights.index_copy_(0, rows, kept)


def nucleus(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Zero all but the fewest largest weights whose sum reaches each row's share of the total."""
    ordered = weights.sort(dim=-1, descending=True).values
    sums = ordered.cumsum(dim=-1)
    before = (sums - ordered).double()  # sum of all larger weights
    kept = (before < shares[:, None] * sums[:, -1:].double()).sum(dim=-1, keepdim=True)
    least = ordered.gather(1, (kept - 1).clamp(min=0))
    return weights.where(weights >= least, 0)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return for each row the first index whose cumulative sum exceeds `uniform * total`.

    Rows with invalid weights (NaN in the logits) get an arbitrary valid index: the next step may look it
    up before the host detects the NaN.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    points = (uniforms * total.double()).long().clamp(max=total - 1)
    found = torch.searchsorted(sums, points[:, None], right=True)[:, 0]
    return found.clamp_(max=weights.shape[1] - 1)


def matching(weights: torch.Tensor, wanted: Sequence[bool]) -> torch.Tensor:
    """Return the indices of wanted rows, int64."""
    rows = [at for at, is_wanted in enumerate(wanted) if is_wanted]
    return to_device(torch.tensor(rows), weights.device)
