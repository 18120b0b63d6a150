"""Comparison of a mixed engine cycle with PEFT, one tenant after another and as one mixed batch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cycle.load import RANK, Load, create_runs, cycle
from bench.cycle.peft_loop import ByHand
from bench.support.timing import Work, fastest, timed
from cotrain_workers.engine.engine import Engine


def measure_by_hand(
    model: Path, load_engine: Callable[[], Engine], load: Load, *, dtype: torch.dtype, device: str,
    mixed_tokens: int, rounds: int, until: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time the three ways in alternation, for each number of tenants.

    PEFT is loaded first, so that an engine which measures free memory leaves PEFT its own. Then both share one
    copy of the base model. A way that runs out of memory is listed in `out_of_memory` and has no times.
    """
    rows: list[dict[str, Any]] = []
    for tenants in load.tenants:
        if rows and time.monotonic() > until:
            break
        hand = ByHand(str(model), tenants, RANK, dtype=dtype, device=device)
        vocab = hand.model.config.vocab_size
        batches = load.batches(tenants, vocab, device)
        ways: dict[str, Work] = {
            "loop": as_torch_comes(partial(hand.loop, batches)),
            "mixed": as_torch_comes(partial(hand.mixed, batches, mixed_tokens)),
            "switch": partial(hand.switch, batches),  # share of the loop that is PEFT's bookkeeping
        }
        lost = [name for name, way in ways.items() if not fits(way, device)]
        engine = load_engine()
        hand.share_base(weights_of(engine))
        create_runs(engine, tenants)
        kept = {name: way for name, way in ways.items() if name not in lost}
        ways = {"ours": cycle(engine, load, tenants), **kept}
        took = fastest(ways, device, rounds=rounds, until=until)
        rows.append(row_of(load, tenants, took) | {"out_of_memory": lost})
        del ways, kept, engine, hand
        forget(device)
    return rows


def row_of(load: Load, tenants: int, took: dict[str, Any]) -> dict[str, Any]:
    """Return our times, and PEFT's times divided by ours: above 1, ours is faster."""
    ours = took["ours"]
    row = {
        "tenants": tenants, "length": load.length, "tokens": load.tokens, "tokens_per_s": load.tokens / ours.wall_s,
        "wall_s": ours.wall_s, "cpu_s": ours.cpu_s,
    }  # fmt: skip
    for name in took.keys() - {"ours"}:
        row |= {
            f"{name}_wall_s": took[name].wall_s, f"{name}_cpu_s": took[name].cpu_s,
            f"over_{name}": took[name].wall_s / ours.wall_s, f"over_{name}_cpu": took[name].cpu_s / ours.cpu_s,
        }  # fmt: skip
    return row


def fits(work: Work, device: str) -> bool:
    """Return True if the work fits into memory."""
    try:
        timed(work, device)
    except torch.OutOfMemoryError:
        forget(device)
        return False
    return True


def as_torch_comes(work: Work) -> Work:
    """Return the same work without the deterministic kernels that the engine enables, as they are slower."""
    matmul = torch.backends.cuda.matmul

    def run() -> None:
        was = torch.are_deterministic_algorithms_enabled()
        reduced = matmul.allow_bf16_reduced_precision_reduction
        torch.use_deterministic_algorithms(mode=False)
        matmul.allow_bf16_reduced_precision_reduction = True
        try:
            work()
        finally:
            torch.use_deterministic_algorithms(mode=was)
            matmul.allow_bf16_reduced_precision_reduction = reduced

    return run


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return an engine's frozen weights by their names in transformers."""
    base = engine._base  # private, as only this bench needs the weights
    named = {f"model.{name}": value for name, value in base.backbone.state_dict().items()}
    return named | {"lm_head.weight": base.head_weight}


def forget(device: str) -> None:
    """Release memory that is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
