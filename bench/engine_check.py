"""Check of the training engine's guarantees on one machine, without a server; `bench engine` measures it.

    python -m bench engine_check --device cuda

It needs torch, transformers, peft, safetensors and numpy. It prints and records parity with plain PEFT, mixed against
alone, the cosine of bf16 gradients, and the gap between sampling and training. The exit status is 1 if a guarantee is
broken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.support.record import DEVICE, Args, Options, Report, Some, show
from cotrain_workers.engine.engine import Engine
from tests.support.decoding import gap_to_trainer, is_same_alone
from tests.support.engine_checks import bf16_gradient_cosine, mixed_against_alone, parity_with_peft
from tests.support.tiny_models import FAMILIES, build_tiny

OPTIONS: Options = {**DEVICE, "families": Some(tuple(FAMILIES))}


def run(args: Args, report: Report) -> bool:
    """Check every guarantee; return True if one is broken."""
    with tempfile.TemporaryDirectory() as folder:
        report["checks"] = list(checks(Path(folder), args.device, args.families))
    return not all(check["kept"] for check in report["checks"])


def checks(folder: Path, device: str, families: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each guarantee with its measurement and `kept`."""
    for family in families:
        model = build_tiny(family, folder / family)
        parity = parity_with_peft(model, device, torch.float32)
        # TF32 is off, but other kernels sum in another order.
        kept = parity.gradient_error < 1e-5 and parity.logprob_error < 2e-5
        yield show({"check": "parity fp32", "family": family, "kept": kept, **asdict(parity)})
        alone = mixed_against_alone(model, device, torch.float32)
        kept = alone.is_bit_equal if device == "cpu" else alone.gradient_error < 1e-5
        yield show({"check": "mixed = alone", "family": family, "kept": kept, **asdict(alone)})
        cosine = bf16_gradient_cosine(model, device)
        kept = cosine > 0.999
        yield show({"check": "bf16 cosine", "family": family, "kept": kept, "cosine": cosine})
        yield from sampling_checks(family, model, device)


def sampling_checks(family: str, model: Path, device: str) -> Iterator[dict[str, Any]]:
    """Yield the gap between sampling and training, and the check that neighbours do not change a sample."""
    for dtype in (torch.float32, torch.bfloat16):
        engine = Engine.load(str(model), device=device, dtype=dtype)
        gap = gap_to_trainer(engine)
        is_wide = dtype == torch.float32
        # Rounding in bf16 has no bound, so it is only reported.
        kept = not is_wide or gap.largest < (1e-5 if device == "cpu" else 5e-5)
        row = {"check": "sample = forward", "dtype": str(dtype).removeprefix("torch.")}
        yield show({**row, "family": family, "kept": kept, **asdict(gap)})
        if is_wide:
            same = is_same_alone(engine)
            yield show({"check": "sample mixed = alone", "family": family, "kept": same, "same": same})
