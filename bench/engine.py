#!/usr/bin/env python3
"""Benchmark of the training engine without a server: tenants, PEFT, and the limits of the machine.

    python bench/engine.py --device cpu|cuda [--preset h200] [--parts tenants,phases] [--out DIR]

Run it from the root of the repository. It needs torch, transformers, peft, safetensors and numpy (and
matplotlib for the picture). Models are Qwen3 shapes with random weights. Ways are timed in alternation, and the
minimum counts. Parts:

* `tenants`: the same tokens shared by 1 to 64 tenants, next to the roofline
* `memory`: bytes against the formulas
* `phases`: a cycle by phase
* `by_hand`: comparison with PEFT
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "workers"), str(ROOT / "scheduler")]

from collections.abc import Iterator, Sequence

import torch
import transformers

from bench.cycle import tables
from bench.cycle.by_hand import forget, measure_by_hand
from bench.cycle.load import RANK
from bench.cycle.memory import measure_memory
from bench.cycle.phases import measure_phases
from bench.cycle.plot import plot
from bench.cycle.presets import PRESETS, Preset
from bench.cycle.tenants import beside_ceiling, measure_tenants
from bench.cycle.verdict import judge, judge_order
from bench.support.machine import machine, show
from bench.support.model import SHAPES, build
from bench.support.roofline import adapter_bytes, measure_rates
from cotrain_workers.engine.engine import Engine

PARTS = ("tenants", "memory", "phases", "by_hand")
#: Share of the time limit after which a part starts no further round.
SHARE = {"tenants": 0.45, "by_hand": 0.9}


@dataclasses.dataclass(frozen=True)
class Bench:
    """One invocation: its settings and its start time."""

    args: argparse.Namespace
    preset: Preset
    began: float  # time.monotonic

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base model."""
        return torch.float32 if self.args.device == "cpu" else torch.bfloat16

    def until(self, part: str, parts: int = 1) -> float:
        """Return the time at which a part that starts now, one of `parts` like it, should stop."""
        return time.monotonic() + SHARE[part] * self.preset.limit_s / parts

    def engine(self, model: Path, backend: str, tokens: int | None = None) -> Engine:
        """Return an engine with the settings of the command line.

        If `tokens` is given, it is the size of micro-batches, and activations are not recomputed.
        """
        settings: dict[str, Any] = {
            "lora_backend": backend,
            "recompute": self.args.recompute,
            "micro_batch_tokens": self.args.micro_batch_tokens,
            "adapter_bytes": self.args.adapter_bytes or self.adapter_bytes(model.name),
        }
        if tokens is not None:
            settings |= {"micro_batch_tokens": tokens, "recompute": "never"}
        given = {name: value for name, value in settings.items() if value is not None}
        return Engine.load(str(model), device=self.args.device, dtype=self.dtype, **given)

    def adapter_bytes(self, size: str) -> int | None:
        """Return the memory of all tenants' adapters on CUDA, limited to 0.4 of the device.

        Beyond that limit tenants run in shifts, which is visible in the number of forwards in the tables.
        """
        if self.args.device == "cpu":
            return None
        tenants = max(tenants for load in self.preset.loads for tenants in load.tenants)
        needed = int(1.01 * tenants * adapter_bytes(SHAPES[size], RANK, self.dtype))
        total: int = torch.cuda.get_device_properties().total_memory
        return min(needed, int(0.4 * total))

    def parts(self, size: str, model: Path) -> Iterator[tuple[str, Any]]:
        """Measure and yield one part after the other while time is left."""
        device, asked = self.args.device, self.args.parts
        # On a CPU, engines of two backends are loaded together, so that they alternate, too.
        together = (
            [self.args.lora_backend] if device == "cpu" else [[b] for b in self.args.lora_backend]
        )
        kept_tokens: int | None = None
        for backends in together:
            engines = {backend: self.engine(model, backend) for backend in backends}
            yield "numerics", [dataclasses.asdict(each.facts.numerics) for each in engines.values()]
            if "tenants" in asked:
                for load in self.preset.loads:
                    yield (
                        "tenants",
                        measure_tenants(
                            engines,
                            load,
                            device,
                            rounds=self.args.rounds,
                            until=self.until("tenants", len(together) * len(self.preset.loads)),
                        ),
                    )
            engine = engines[backends[0]]
            # An engine loaded next to PEFT would measure the memory that PEFT leaves on the device.
            if device == "cuda" and kept_tokens is None and not engine.recomputes:
                kept_tokens = engine.facts.numerics.micro_batch_tokens
            if "phases" in asked and self.has_time():
                yield "phases", list(self.phases(engine, backends[0]))
            if "memory" in asked and self.has_time():
                yield "memory", [measure_memory(engine, size, self.dtype, device)]
            del engine, engines
            forget(device)
        if "by_hand" in asked and self.has_time():
            yield (
                "by_hand",
                measure_by_hand(
                    model,
                    lambda: self.engine(model, self.args.lora_backend[0], kept_tokens),
                    self.preset.by_hand,
                    dtype=self.dtype,
                    device=device,
                    mixed_tokens=self.preset.mixed_tokens,
                    rounds=self.args.rounds,
                    until=self.until("by_hand"),
                ),
            )

    def phases(self, engine: Engine, backend: str) -> Iterator[dict[str, Any]]:
        """Profile the smallest and the largest number of tenants of every load."""
        for load in self.preset.loads:
            for tenants in (min(load.tenants), max(load.tenants)):
                row = measure_phases(engine, load, tenants, self.args.device)
                yield {"backend": backend, **row}

    def has_time(self) -> bool:
        """Return True if there is time for another part."""
        if time.monotonic() < self.began + self.preset.limit_s * SHARE["by_hand"]:
            return True
        print("out of time: the rest is left out (--parts measures it alone)", flush=True)
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the report; return 0 for any result, because a slow machine is not an error."""
    args = parse(argv)
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    preset = PRESETS[args.preset]
    if args.sizes:
        preset = dataclasses.replace(preset, sizes=tuple(args.sizes))
    if args.limit_s:
        preset = dataclasses.replace(preset, limit_s=args.limit_s)
    args.rounds = args.rounds or preset.rounds
    bench = Bench(args, preset, time.monotonic())
    report: dict[str, Any] = {"machine": machine(args.device), "preset": args.preset, "sizes": {}}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"engine-{args.preset}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    with tempfile.TemporaryDirectory() as scratch:
        for size in preset.sizes:
            model = build((args.models or Path(scratch)) / size, size, bench.dtype, args.device)
            forget(args.device)
            measure_size(bench, size, model, report, path)
    print(f"wrote {path}")
    if plot(report, path.with_suffix(".png")):
        print(f"wrote {path.with_suffix('.png')}")
    else:
        print("no picture: matplotlib is not installed")
    return 0


def measure_size(bench: Bench, size: str, model: Path, report: dict[str, Any], path: Path) -> None:
    """Measure one model. The report is written after each part, so that a killed run leaves partial results."""
    rates = measure_rates(bench.args.device, bench.dtype)
    parts: dict[str, Any] = report["sizes"].setdefault(size, {})
    for part, rows in bench.parts(size, model):
        parts.setdefault(part, []).extend(rows)
        path.write_text(json.dumps(report, indent=1) + "\n")
        for row in rows:
            show({"part": part, **row})
    rates = rates.fastest(measure_rates(bench.args.device, bench.dtype))
    parts["rates"] = dataclasses.asdict(rates)
    parts["tenants"] = [beside_ceiling(row, size, rates) for row in parts.get("tenants", [])]
    report["load_at_end"] = os.getloadavg()
    parts["verdicts"] = [
        judge(target, *(parts.get(name, []) for name in ("tenants", "by_hand", "phases")))
        for target in bench.preset.targets
    ]
    parts["order"] = judge_order(parts["tenants"])
    path.write_text(json.dumps(report, indent=1) + "\n")
    print_size(size, parts)


def print_size(size: str, parts: dict[str, Any]) -> None:
    """Print the tables of one model."""
    print(f"\n## {size}")
    show(parts["rates"])
    for each in parts.get("numerics", []):
        show(each)
    for name, formats in (
        ("tenants", tables.TENANTS),
        ("by_hand", tables.BY_HAND),
        ("memory", tables.MEMORY),
    ):
        if parts.get(name):
            print(f"\n{name}\n{tables.table(parts[name], formats)}")
    if parts.get("phases"):
        print(f"\nphases\n{tables.phase_table(parts['phases'])}")
    print("\n" + "\n".join([*parts["verdicts"], *parts["order"]]), flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default: by the device's memory")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--models", type=Path, help="where to keep the random models between calls")
    parser.add_argument("--sizes", type=names, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--parts", type=names, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--lora-backend", type=names, default=["auto"], help="auto, seg, grouped, fused"
    )
    parser.add_argument("--recompute", choices=("auto", "always", "never"))
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--adapter-bytes", type=int)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--limit-s", type=float, help="no round or part begins near it")
    args = parser.parse_args(argv)
    if args.preset is None:
        args.preset = (
            "cpu" if args.device == "cpu" else preset_of(torch.cuda.get_device_properties())
        )
    return args


def preset_of(card: Any) -> str:
    """Return the preset of a card by its memory."""
    return "h200" if card.total_memory > 100e9 else "h100" if card.total_memory > 60e9 else "cuda"


def names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return text.split(",")


if __name__ == "__main__":
    raise SystemExit(main())
