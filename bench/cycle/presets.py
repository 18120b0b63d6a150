"""Presets of the benchmark: sizes, loads and targets per device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.cycle.load import Load

Figure = Literal["many_over_one", "over_loop", "tokens_per_s"]


@dataclass(frozen=True)
class Target:
    """Bound on one figure of one row: a maximum for a cost, else a minimum."""

    figure: Figure
    tenants: int
    length: int
    bound: float

    def verdicts(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Return a sentence for each row with this figure, or one that says that it was not measured."""
        where = f"{self.figure} at {self.tenants} tenants, {self.length} tokens a sequence"
        own = [row for row in rows if (row["tenants"], row["length"]) == (self.tenants, self.length)]
        return [
            f"{'kept' if self.is_kept(row[self.figure]) else 'MISSED'}: {where}, {row.get('backend', 'by hand')}:"
            f" {row[self.figure]:.4g} (promised {self.bound:g})"
            for row in own
            if self.figure in row
        ] or [f"not measured: {where} (promised {self.bound:g})"]

    def is_kept(self, measured: float) -> bool:
        return measured <= self.bound if self.figure == "many_over_one" else measured >= self.bound


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes, loads and targets of one benchmark."""

    sizes: tuple[str, ...]
    loads: tuple[Load, ...]
    by_hand: Load  # for the comparison with PEFT
    many_over_one: float  # at most, for the first load
    over_loop: float | None = None  # at least
    tokens_per_s: float | None = None  # at least, for the last load
    rounds: int
    limit_s: float = 500.0  # no further round or part starts after it
    mixed_tokens: int = 2048  # maximum tokens of PEFT's mixed batch, which holds dense logits

    def targets(self) -> Iterator[Target]:
        """Yield the bounds, each for the most tenants of its load."""
        loads: dict[Figure, Load] = {
            "tokens_per_s": self.loads[-1], "over_loop": self.by_hand, "many_over_one": self.loads[0],
        }  # fmt: skip
        for figure, load in loads.items():
            if (bound := getattr(self, figure)) is not None:
                yield Target(figure, max(load.tenants), load.length, bound)


PRESETS = {
    "cpu": Preset(
        sizes=("small",), loads=(Load(64, 64, (1, 4, 16, 64)),), by_hand=Load(64, 64, (64, 16, 4)),
        many_over_one=1.20, over_loop=1.5, rounds=5, limit_s=220.0, mixed_tokens=4096,
    ),
    "cuda": Preset(
        sizes=("0.6b", "4b"), loads=(Load(64, 512, (1, 4, 16, 64)),), by_hand=Load(64, 512, (16,)),
        many_over_one=1.05, rounds=4,
    ),
    "h200": Preset(
        sizes=("8b",), loads=(Load(64, 512, (1, 4, 16, 64)), Load(32, 2048, (1, 32))),
        by_hand=Load(64, 512, (64,)), many_over_one=1.05, over_loop=2.5, tokens_per_s=15_000.0, rounds=3,
    ),
    "h100": Preset(  # the speed is that of NeMo on one H100, LoRA of 8B
        sizes=("8b",), loads=(Load(32, 512, (1, 4, 16)), Load(16, 2048, (1, 16))),
        by_hand=Load(32, 512, (16,)), many_over_one=1.05, over_loop=2.5, tokens_per_s=12_473.0, rounds=3,
    ),
    "smoke": Preset(
        sizes=("tiny",), loads=(Load(4, 40, (1, 4)),), by_hand=Load(4, 40, (4,)),
        many_over_one=1000.0, over_loop=1000.0, rounds=1, limit_s=600.0, mixed_tokens=80,
    ),
}  # fmt: skip
