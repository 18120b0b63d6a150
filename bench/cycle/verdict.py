"""Verdicts on targets; a missed target is explained by its most expensive phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cycle.presets import Target

Row = dict[str, Any]


def judge(
    target: Target, tenants: Sequence[Row], by_hand: Sequence[Row], phases: Sequence[Row]
) -> str:
    """Return a sentence about one target, from the rows of the measured parts."""
    rows = by_hand if target.figure == "over_loop" else tenants
    found = [
        row
        for row in rows
        if (row["tenants"], row["length"]) == (target.tenants, target.length)
        and target.figure in row
    ]
    where = f"{target.figure} at {target.tenants} tenants, {target.length} tokens a sequence"
    if not found:
        return f"not measured: {where} (promised {target.bound:g})"
    sentences = []
    for row in found:
        measured = row[target.figure]
        name = f"{where}, {row['backend']}" if "backend" in row else where
        kept = target.is_kept(measured)
        why = "" if kept else f"; {costliest(target, of_backend(phases, row))}"
        sentences.append(
            f"{'kept' if kept else 'MISSED'}: {name}: {measured:.4g} (promised {target.bound:g}){why}"
        )
    return "\n".join(sentences)


def judge_order(tenants: Sequence[Row]) -> list[str]:
    """Return the order of LoRA backends by speed for each load; empty unless several were measured.

    "auto" should select the fastest backend of the relevant loads on such a device.
    """
    by_load: dict[tuple[int, int], dict[str, float]] = {}
    for row in tenants:
        speeds = by_load.setdefault((row["tenants"], row["length"]), {})
        speeds[row["backend"]] = row["tokens_per_s"]
    sentences = []
    for (count, length), speeds in by_load.items():
        if len(speeds) < 2:
            continue
        order = sorted(speeds, key=speeds.__getitem__, reverse=True)
        shares = [f"{name} {speeds[name] / speeds[order[0]]:.2f}" for name in order]
        sentences.append(
            f"LoRA at {count} tenants, {length} tokens a sequence: {', '.join(shares)}"
        )
    return sentences


def of_backend(phases: Sequence[Row], row: Row) -> list[Row]:
    """Return the profiles of the backend of a row; rows by hand have no backend and match all."""
    return [each for each in phases if row.get("backend", each["backend"]) == each["backend"]]


def costliest(target: Target, phases: Sequence[Row]) -> str:
    """Return the most expensive phase, compared with one tenant if the target is such a ratio."""
    ms_by_tenants = {row["tenants"]: row["ms"] for row in phases if row["length"] == target.length}
    many, one = ms_by_tenants.get(target.tenants), ms_by_tenants.get(1)
    if many is None:
        return "no breakdown was measured"
    if target.figure == "many_over_one" and one is not None:
        over = {phase: many[phase] - one[phase] for phase in many}
        worst = max(over, key=over.__getitem__)
        return f"most of it in {worst}: {over[worst]:.0f} ms more than one tenant takes there"
    first, second, *_ = sorted(many, key=many.__getitem__, reverse=True)
    total = sum(many.values())
    return ", then ".join(f"{each} {many[each] / total:.0%}" for each in (first, second))
