"""Which segments of a micro-batch one grouped product takes, and with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.stacked_weights import (
    StackedWeights,
    padded_rank,
    plan_stack,
    stack_class,
)
from cotrain_workers.engine.spec import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from cotrain_workers.engine.routing import Segment, Source

ROWS = 8  # that every segment starts at a multiple of
# A grouped product takes 1,023 groups; one is the filler's.
MOST_SEGMENTS = 1022


# Segments (by number) that want a gradient, each into matrices that no other of the round adds to.
Round = Sequence[tuple[int, Mapping[str, Pair]]]


@dataclass(frozen=True)
class Groups:
    """Neighbouring segments of one stack class: rows `start` to `stop` of the packed row."""

    start: int
    stop: int
    stacked: StackedWeights
    segments: Sequence[Segment]
    slots: Sequence[int]  # of each segment's adapter in the stack
    rounds: Sequence[Round]
    adapter_ends: torch.Tensor  # int32 [adapters + 1]: where each one's rows end, then the filler's
    segment_ends: torch.Tensor  # int32 [segments]: where each one's rows end
    scales: torch.Tensor  # fp32 [stop - start, 1]

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows `[n, …]` of `rows` `[T, …]`."""
        return rows[self.start : self.stop]


def find_groups(segments: Sequence[Segment], rows: int, dtype: torch.dtype) -> Iterator[Groups]:
    """Put neighbours of one stack class together, in a packed row of `rows`; those of a base model
    without adapter have none.
    """
    cuts = list(neighbours(segments))
    starts = [own[0].start for own in cuts]
    for own, start, stop in zip(cuts, starts, [*starts, rows][1:], strict=True):
        if own[0].source.layout.targets:
            yield make_groups(own, start, stop, dtype)


def neighbours(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield segments that follow each other, are of one class, and are not too many for one call."""
    for _, same in groupby(segments, key=lambda segment: stack_class(segment.source.layout)):
        own = list(same)
        for at in range(0, len(own), MOST_SEGMENTS):
            yield own[at : at + MOST_SEGMENTS]


def make_groups(own: Sequence[Segment], start: int, stop: int, dtype: torch.dtype) -> Groups:
    """StackedWeights the adapters of some segments; each one's rows go up to where the next one's start."""
    last = start + -(-(own[-1].stop - start) // ROWS) * ROWS
    ends = [segment.start - start for segment in own[1:]] + [last - start]
    sources: list[Source] = []
    slots: list[int] = []
    adapter_ends: list[int] = []
    for segment, end in zip(own, ends, strict=True):
        if sources and sources[-1] is segment.source:
            adapter_ends[-1] = end
        else:
            sources.append(segment.source)
            adapter_ends.append(end)
        slots.append(len(sources) - 1)
    layout = own[0].source.layout
    device = sources[0].weights.device
    counts = [end - before for end, before in zip(ends, [0, *ends], strict=False)]
    scales = np.repeat([segment.scale for segment in own], counts)
    filler = np.zeros(stop - start - ends[-1])
    return Groups(
        start=start,
        stop=stop,
        stacked=StackedWeights(
            plan_stack(padded_rank(layout.rank), layout.targets), sources, dtype
        ),
        segments=own,
        slots=slots,
        rounds=find_rounds(own),
        adapter_ends=to_device(np.array([*adapter_ends, stop - start], np.int32), device),
        segment_ends=to_device(np.array(ends, np.int32), device),
        scales=to_device(np.concatenate([scales, filler]).astype(np.float32)[:, None], device),
    )


def find_rounds(segments: Sequence[Segment]) -> Sequence[Round]:
    """Order the additions to gradients: one launch adds to many, and to none of them twice."""
    rounds: list[list[tuple[int, Mapping[str, Pair]]]] = []
    round_by_gradient: dict[int, int] = {}
    for at, segment in enumerate(segments):
        if segment.grads is None:
            continue
        number = round_by_gradient.get(id(segment.grads), 0)
        round_by_gradient[id(segment.grads)] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append((at, segment.grads))
    return rounds
