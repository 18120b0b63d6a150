"""Comparison of many tenants with one at the same number of tokens, and of both with the machine's ceiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.cycle.load import RANK, Load, create_runs, cycle
from bench.support.model import SHAPES
from bench.support.roofline import Rates, ceiling
from bench.support.timing import Work, fastest
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput


def measure_tenants(
    engines: Mapping[str, Engine], load: Load, device: str, *, rounds: int, until: float
) -> list[dict[str, Any]]:
    """Time cycles of every backend and number of tenants in alternation.

    The keys of `engines` are the names of their LoRA backends.
    """
    ways: dict[tuple[str, int], Work] = {}
    forwards: dict[tuple[str, int], int] = {}
    for backend, engine in engines.items():
        create_runs(engine, max(load.tenants))
        for tenants in load.tenants:
            key = backend, tenants
            ways[key] = counted(cycle(engine, load, tenants), key, forwards)
    took = fastest(ways, device, rounds=rounds, until=until)
    rows = []
    for (backend, tenants), best in took.items():
        one = took[backend, min(load.tenants)]
        rows.append(
            {
                "backend": backend,
                "tenants": tenants,
                "length": load.length,
                "tokens": load.tokens,
                "forwards": forwards[backend, tenants],
                "wall_s": best.wall_s,
                "cpu_s": best.cpu_s,
                "tokens_per_s": load.tokens / best.wall_s,
                "many_over_one": best.wall_s / one.wall_s,
                "many_over_one_cpu": best.cpu_s / one.cpu_s,
            }
        )
    return rows


def counted(
    work: Callable[[], CycleOutput], key: tuple[str, int], forwards: dict[tuple[str, int], int]
) -> Work:
    """Return the same work, which also records its number of forwards."""

    def run() -> None:
        forwards[key] = work().forwards

    return run


def beside_ceiling(row: dict[str, Any], size: str, rates: Rates) -> dict[str, Any]:
    """Return a row with the ceiling of the machine and the reached share of it."""
    possible = ceiling(
        SHAPES[size], row["length"], RANK, rates, adapters=row["tenants"], tokens=row["tokens"]
    )
    return row | {"ceiling_tokens_per_s": possible, "of_ceiling": row["tokens_per_s"] / possible}
