"""Prompts that neighbouring datums of a pass share: the base model computes their rows once. Pure.

The first datum of a group has all of its rows in the packed row. Each other one has only the rows after the prompt, whose
queries attend to the prompt's keys and values of the first. So gradients of the prompt add up from all of them.
The head still receives every row of every datum.

A group depends on the datums of its op alone, so an op has the same bits with and without neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cotrain_workers.engine.ops import Datum

#: Tokens of a shorter prompt are computed again: each group takes more calls of the attention.
LEAST_SHARED = 64

#: Start and stop in the packed row, and True if the rows belong to an earlier datum.
Span = tuple[int, int, bool]


def shared_prompts(datums: Sequence[Datum]) -> list[int]:
    """Return, for each datum, how many of its first tokens are those of the first datum of its group; 0 for that one.

    Groups are neighbours. A datum joins the group before it if more tokens are then saved in the group.
    """
    shared = [0] * len(datums)
    first, prompt = 0, 0
    for at in range(1, len(datums)):
        members = at - first
        may_share = min(len(datums[first].tokens), len(datums[at].tokens)) > LEAST_SHARED
        common = common_prompt(datums[first], datums[at]) if may_share else 0
        common = min(common, prompt) if members > 1 else common
        if common >= LEAST_SHARED and members * common > (members - 1) * prompt:
            prompt = common
            shared[first + 1 : at + 1] = [prompt] * members
        else:
            first, prompt = at, 0
    return shared


def common_prompt(one: Datum, other: Datum) -> int:
    """Return the number of equal first tokens with equal given experts; at least one token of each is left.

    Datums with images share nothing.
    """
    if one.images or other.images:
        return 0
    most = max(0, min(len(one.tokens), len(other.tokens)) - 1)
    differs = one.tokens[:most] != other.tokens[:most]
    experts, others = one.routed_experts, other.routed_experts
    if (experts is None) != (others is None):
        return 0
    if experts is not None and others is not None:
        both = min(most, len(experts), len(others))
        differs = differs[:both] | (experts[:both] != others[:both]).any(axis=(1, 2))
    return int(differs.argmax()) if differs.any() else len(differs)


def rows_of(lengths: Sequence[int], shared: Sequence[int]) -> int:
    """Return the rows of the datums of a slice. The first of them takes no rows of another one."""
    return sum(lengths) - sum(shared[1:])


def spans_of(start: int, lengths: Sequence[int], shared: Sequence[int]) -> list[Span]:
    """Return the rows of each datum of a slice that begins at row `start` of the packed row, in order."""
    spans: list[Span] = []
    first = at = start
    for number, (length, prompt) in enumerate(zip(lengths, shared, strict=True)):
        if number == 0 or not prompt:
            first, prompt = at, 0
        else:
            spans.append((first, first + prompt, True))
        spans.append((at, at + length - prompt, False))
        at += length - prompt
    return spans


def repeat(hidden: torch.Tensor, spans: Mapping[int, Sequence[Span]]) -> tuple[torch.Tensor, dict[int, int]]:
    """Append all rows of all datums of some slices to the hidden states `[T, d]` of a packed row.

    `spans` are by the first row of the slice. Returns the states `[T + n, d]`, and the new first row by the first row. All
    other rows stay at their places.
    """
    starts, parts = {}, [hidden]
    rows = len(hidden)
    for first, of_slice in spans.items():
        starts[first] = rows
        parts += [hidden[start:stop] for start, stop, _ in of_slice]
        rows += sum(stop - start for start, stop, _ in of_slice)
    return (torch.cat(parts) if starts else hidden), starts


def fold(grad: torch.Tensor, spans: Mapping[int, Sequence[Span]], starts: Mapping[int, int]) -> None:
    """Write the gradient of the rows that `repeat` appended to their rows of `grad` `[T + n, d]`; add where rows are shared."""
    for first, of_slice in spans.items():
        at = starts[first]
        for start, stop, is_shared in of_slice:
            part = grad[at : at + stop - start]
            if is_shared:
                grad[start:stop] += part
            else:
                grad[start:stop] = part
            at += stop - start
