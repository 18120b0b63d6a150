"""Presets of the benchmark: sizes, loads and targets per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.cycle.load import Load

Figure = Literal["many_over_one", "over_loop", "tokens_per_s"]


@dataclass(frozen=True)
class Target:
    """Bound on one figure of one row: a maximum for a cost, else a minimum."""

    figure: Figure
    tenants: int
    length: int
    bound: float

    def is_kept(self, measured: float) -> bool:
        """Return True if the target is reached."""
        return measured <= self.bound if self.figure == "many_over_one" else measured >= self.bound


@dataclass(frozen=True)
class Preset:
    """Sizes, loads and targets of one benchmark."""

    sizes: tuple[str, ...]
    loads: tuple[Load, ...]
    by_hand: Load  # for the comparison with PEFT
    targets: tuple[Target, ...]
    rounds: int
    limit_s: float  # no further round or part starts after it
    mixed_tokens: int  # maximum tokens of PEFT's mixed batch, which holds dense logits


#: Columns of the table of each part, as in docs/develop/benchmarks.md.
TABLES = {
    "tenants": {
        "backend": "{}", "tenants": "{}", "length": "{}", "forwards": "{}", "wall_s": "{:.3f}", "cpu_s": "{:.3f}",
        "many_over_one": "{:.3f}", "many_over_one_cpu": "{:.3f}", "tokens_per_s": "{:,.0f}",
        "ceiling_tokens_per_s": "{:,.0f}", "of_ceiling": "{:.0%}",
    },
    "by_hand": {
        "tenants": "{}", "length": "{}", "tokens_per_s": "{:,.0f}", "wall_s": "{:.3f}", "cpu_s": "{:.3f}",
        "loop_wall_s": "{:.3f}", "over_loop": "{:.2f}", "over_loop_cpu": "{:.2f}",
        "switch_wall_s": "{:.3f}", "mixed_wall_s": "{:.3f}", "over_mixed": "{:.2f}", "over_mixed_cpu": "{:.2f}",
    },
    "memory": {
        "per_adapter": "{:,.0f}", "ideal_per_adapter": "{:,.0f}", "saved_per_token": "{:,.0f}",
        "peak_per_token": "{:,.0f}", "ideal_per_token": "{:,.0f}",
    },
}  # fmt: skip

PRESETS = {
    "cpu": Preset(
        sizes=("small",),
        loads=(Load(64, 64, (1, 4, 16, 64)),),
        by_hand=Load(64, 64, (64, 16, 4)),  # the row with a target first
        targets=(Target("many_over_one", 64, 64, 1.20), Target("over_loop", 64, 64, 1.5)),
        rounds=5,
        limit_s=220.0,
        mixed_tokens=4096,
    ),
    "cuda": Preset(
        sizes=("0.6b", "4b"),
        loads=(Load(64, 512, (1, 4, 16, 64)),),
        by_hand=Load(64, 512, (16,)),
        targets=(Target("many_over_one", 64, 512, 1.05),),
        rounds=4,
        limit_s=500.0,
        mixed_tokens=2048,
    ),
    "h200": Preset(
        sizes=("8b",),
        loads=(Load(64, 512, (1, 4, 16, 64)), Load(32, 2048, (1, 32))),
        by_hand=Load(64, 512, (64,)),
        targets=(
            Target("tokens_per_s", 32, 2048, 15_000.0),
            Target("over_loop", 64, 512, 2.5),
            Target("many_over_one", 64, 512, 1.05),
        ),
        rounds=3,
        limit_s=500.0,
        mixed_tokens=2048,
    ),
    "h100": Preset(
        sizes=("8b",),
        loads=(Load(32, 512, (1, 4, 16)), Load(16, 2048, (1, 16))),
        by_hand=Load(32, 512, (16,)),
        targets=(
            Target("tokens_per_s", 16, 2048, 12_473.0),  # NeMo on one H100, LoRA of 8B
            Target("over_loop", 16, 512, 2.5),
            Target("many_over_one", 16, 512, 1.05),
        ),
        rounds=3,
        limit_s=500.0,
        mixed_tokens=2048,
    ),
    "smoke": Preset(
        sizes=("tiny",),
        loads=(Load(4, 40, (1, 4)),),
        by_hand=Load(4, 40, (4,)),
        targets=(Target("many_over_one", 4, 40, 1000.0), Target("over_loop", 4, 40, 1000.0)),
        rounds=1,
        limit_s=600.0,
        mixed_tokens=80,
    ),
}
