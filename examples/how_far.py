"""Progress of an activity: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[int, int, str], None]

EVERY_S = 5.0
"""Interval between two lines of a log."""


@contextmanager
def reported(doing: str, console: Console) -> Iterator[Report]:
    """Print the current activity. Yield `report(step, steps, note)` for its progress."""
    console.print(f"{doing} …", highlight=False)
    if not console.is_terminal:
        yield _lines(doing, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, *times, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, note="")
        yield lambda step, steps, note="": bar.update(
            task, description=f"step {step}/{steps}", completed=step, total=steps, note=note
        )


def _lines(doing: str, console: Console) -> Report:
    """Write a line if the last one is older than `EVERY_S`, and for the last step."""
    first: tuple[int, float] | None = None  # excludes the time before the first step
    last = 0, time.monotonic()

    def report(step: int, steps: int, note: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        if step == last[0]:
            return
        first = first or (step, now)
        if step < steps and (step == first[0] or now - last[1] < EVERY_S):
            return
        last = step, now
        left_s = (now - first[1]) / max(1, step - first[0]) * (steps - step)
        parts = (f"step {step} of {steps}", note, f"{left_s:.0f} s left")
        line = ", ".join(part for part in parts if part)
        console.print(f"{doing}: {line}", highlight=False, soft_wrap=True)

    return report
