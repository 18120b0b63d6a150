"""What one decoder step computes: pages of prompts, and generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_workers.engine.decoding.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens of one prompt, all on one page, that one step computes."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def page(self) -> int:
        """Return its place in the sequence's page table."""
        return self.start // self.sequence.group.page_tokens

    @property
    def ends_prompt(self) -> bool:
        """Return whether the prompt is complete with it."""
        return self.stop == len(self.sequence.group.prompt)


@dataclass(frozen=True)
class Row:
    """A generated token whose keys and values one step computes."""

    sequence: Sequence
    position: int

    @property
    def start(self) -> int:
        """Return its position."""
        return self.position

    @property
    def stop(self) -> int:
        """Return the position after it."""
        return self.position + 1

    @property
    def is_last(self) -> bool:
        """Return whether the next token follows it; rows before it make up for a preemption."""
        return self.position == self.sequence.length - 1


@dataclass
class Plan:
    """One step: first copy, then blank, then compute."""

    rows: list[Row] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # page to write -> page to read
    blank: list[int] = field(default_factory=list)  # pages that hold what their last user left
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def work(self) -> list[Row | Chunk]:
        """Return everything to compute."""
        return [*self.rows, *self.chunks]
