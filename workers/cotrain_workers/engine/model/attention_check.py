"""A small packed row that every attention kernel must solve as dense attention does before it is used."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.model.kernel_check import difference

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.routing import AttentionRule

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Lengths of the sequences of the comparison: across blocks, short, and a block of their own.
PROBE = (200, 1, 3, 180, 256)
#: Over the largest value, of results in 16 bits against fp32: rounded probabilities, twice in backward.
TOLERANCE = 2e-2

log = logging.getLogger(__name__)


def agrees(
    name: str,
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    rule: AttentionRule,
) -> bool:
    """Compare a kernel with dense attention over sequences of the lengths `PROBE`, forward and backward.

    `shape` is query heads, key-value heads and head size. If it fails or differs, the log says so.
    """
    heads, kv_heads, size = shape
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(sum(PROBE), n, size, generator=generator, device=device, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    try:
        found = difference(attend, partial(dense, rule=rule), q, k, v)
    except Exception:  # whatever the kernel does not like
        log.exception("%s cannot run here and is not used for %s", name, rule)
        return False
    if not found < TOLERANCE:
        log.error("%s is off by %.3g and is not used for %s", name, found, rule)
    return found < TOLERANCE


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attend over a row of sequences of the lengths `PROBE`, in fp32 with all scores, without a cap; `[T, heads, d]`."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
    which = torch.repeat_interleave(torch.tensor(PROBE)).to(q.device)
    at = torch.arange(len(which), device=q.device)
    back = at[:, None] - at[None, :]
    seen = (which[:, None] == which) & (back >= 0) & (back < (rule.window or len(which)))
    scores = q @ k.transpose(-1, -2) * rule.scaling
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
