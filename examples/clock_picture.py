"""Draw requests against clock cycles: one row of axes per loop, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from clock_watch import Cycle, Request

mpl.use("Agg")  # draws into a file; needs no screen
from matplotlib import pyplot

COLORS = {"forward_backward": "tab:blue", "optim_step": "tab:orange"}
CYCLE = "0.75"
NARROWEST = 0.004
"""Share of the width that the shortest cycle is drawn with, to be seen at all."""


def draw(
    requests: Mapping[str, Sequence[Request]], cycles: Sequence[Cycle], title: str, path: Path, period_s: float | None
) -> None:
    """Write a PNG: a grey band with its number for each cycle, a bar with that of its step for each request.

    A bar ends where the loop reads the result, which may have been there before.
    `period_s` is the metronome's period, whose ticks are dotted; None where there is none.
    """
    figure, rows = pyplot.subplots(len(requests), figsize=(8, 1.7 * len(requests)), sharex=True, layout="constrained")
    longest_s = max(each[-1].answered_at - each[0].sent_at for each in requests.values())
    for axes, (name, sent) in zip(rows, requests.items(), strict=True):
        _draw_cycles(axes, cycles, sent, NARROWEST * longest_s)
        _draw_requests(axes, sent)
        if period_s:
            _draw_ticks(axes, period_s, sent[0].sent_at, longest_s)
        axes.set(title=name, yticks=(), xlim=(-0.02 * longest_s, 1.02 * longest_s), ylim=(-0.6, 4))
        axes.spines[["left", "right", "top"]].set_visible(False)
    rows[-1].set_xlabel("seconds")
    figure.suptitle(title)
    bands = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (*COLORS.values(), CYCLE)]
    figure.legend(bands, [*COLORS, "clock cycle"], loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_requests(axes: Any, sent: Sequence[Request]) -> None:
    """Draw a step's requests one above the other, and every other step lower, as steps may overlap."""
    for index, request in enumerate(sent):
        step, is_second = divmod(index, 2)
        height = 2 * (1 - step % 2) + (0 if is_second else 0.8)
        took_s, start_s = request.answered_at - request.sent_at, request.sent_at - sent[0].sent_at
        axes.barh(height, took_s, left=start_s, height=0.7, color=COLORS[request.op])
        axes.text(
            start_s + took_s / 2, height, str(step + 1), ha="center", va="center", fontsize=7,
            color="white", clip_on=True,
        )  # fmt: skip


def _draw_cycles(axes: Any, cycles: Sequence[Cycle], sent: Sequence[Request], narrowest_s: float) -> None:
    for cycle in cycles:
        if sent[0].sent_at <= cycle.ended_at and cycle.started_at <= sent[-1].answered_at:
            start = cycle.started_at - sent[0].sent_at
            end = start + max(cycle.ended_at - cycle.started_at, narrowest_s)
            axes.axvspan(start, end, color=CYCLE, zorder=0)
            axes.text((start + end) / 2, 3.5, str(cycle.number), ha="center", fontsize=7)


def _draw_ticks(axes: Any, period_s: float, first_s: float, longest_s: float) -> None:
    """Dot every tick, used or not: they are multiples of the period."""
    offset_s = period_s - first_s % period_s
    for tick in range(int((longest_s - offset_s) / period_s) + 1):
        axes.axvline(offset_s + tick * period_s, color="0.4", linestyle=":", linewidth=1, zorder=0.5)
