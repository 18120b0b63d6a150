"""Benchmark of the training engine without a server: tenants, PEFT, and the limits of the machine.

    python -m bench engine --device cpu|cuda [--preset h200] [--parts tenants,phases]

It needs torch, transformers, peft, safetensors and numpy, and no package of ours installed. Models are Qwen3 shapes
with random weights. Ways are timed in alternation, and the minimum counts. Parts:

* `tenants`: the same tokens shared by 1 to 64 tenants, next to the roofline
* `memory`: bytes against the formulas, on a GPU
* `phases`: a cycle by phase
* `by_hand`: comparison with PEFT
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.cycle.load import RANK, Load, create_runs, cycle, measure_memory
from bench.cycle.peft import forget, measure_by_hand
from bench.cycle.phases import measure_phases
from bench.cycle.presets import PRESETS, Preset
from bench.support.model import SHAPES, build
from bench.support.record import DEVICE, Args, Choice, Options, Report, Some, names, show
from bench.support.roofline import Rates, adapter_bytes, ceiling, measure_rates
from bench.support.timing import Work, fastest
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput

#: Share of the time limit after which a part starts no further round.
SHARE = {"tenants": 0.45, "by_hand": 0.9}
OPTIONS: Options = {
    **DEVICE,
    "preset": (Choice(tuple(PRESETS)), "by default from the device's memory"),
    "sizes": (names, f"of {', '.join(SHAPES)}"), "parts": Some(("tenants", "memory", "phases", "by_hand")),
    "lora_backend": (["auto"], "of auto, seg, fused"),
    "rounds": (0, "0: of the preset"), "limit_s": (float, "no round or part begins near it"),
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    """Measure, print and record; a slow machine is not an error."""
    if args.preset is None:
        args.preset = "cpu" if args.device == "cpu" else preset_of(torch.cuda.get_device_properties())
    given = {"sizes": tuple(args.sizes or ()), "limit_s": args.limit_s, "rounds": args.rounds}
    preset = dataclasses.replace(PRESETS[args.preset], **{name: value for name, value in given.items() if value})
    bench = Bench(args, preset, time.monotonic())
    report |= {"preset": args.preset, "sizes": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for size in preset.sizes:
            model = build((args.models or Path(scratch)) / size, size, bench.dtype, args.device)
            forget(args.device)
            measure_size(bench, size, model, report)


def preset_of(card: Any) -> str:
    return "h200" if card.total_memory > 100e9 else "h100" if card.total_memory > 60e9 else "cuda"


def measure_size(bench: Bench, size: str, model: Path, report: Report) -> None:
    """Measure one model. The report is written after each part, so that a killed run leaves partial results."""
    rates = measure_rates(bench.args.device, bench.dtype)
    parts: dict[str, Any] = report["sizes"].setdefault(size, {})
    for part, rows in bench.parts(size, model):
        parts.setdefault(part, []).extend(rows)
        report.write()
        for row in rows:
            show({"part": part, **row})
    rates = rates.fastest(measure_rates(bench.args.device, bench.dtype))
    parts["rates"] = dataclasses.asdict(rates)
    parts["tenants"] = [beside_ceiling(row, size, rates) for row in parts.get("tenants", [])]
    report["load_at_end"] = os.getloadavg()
    rows = [*parts["tenants"], *parts.get("by_hand", [])]
    parts["verdicts"] = [each for target in bench.preset.targets() for each in target.verdicts(rows)]
    report.write()
    for each in (parts["rates"], *parts["tenants"]):
        show(each)
    print("\n".join(parts["verdicts"]), flush=True)


@dataclasses.dataclass(frozen=True)
class Bench:
    """One invocation: its settings and its start time."""

    args: Args
    preset: Preset
    began: float  # time.monotonic

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.args.device == "cpu" else torch.bfloat16

    def parts(self, size: str, model: Path) -> Iterator[tuple[str, Any]]:
        """Measure and yield one part after the other while time is left."""
        device, asked, preset = self.args.device, self.args.parts, self.preset
        backends: list[str] = self.args.lora_backend
        kept_tokens: int | None = None
        for backend in backends:
            engine = self.engine(model, backend)
            yield "numerics", [dataclasses.asdict(engine.facts.numerics)]
            for load in preset.loads if "tenants" in asked else ():
                until = self.until("tenants", len(backends) * len(preset.loads))
                rows = measure_tenants(engine, load, device, preset.rounds, until)
                yield "tenants", [{"backend": backend, **row} for row in rows]
            # An engine loaded next to PEFT would measure the memory that PEFT leaves on the device.
            if device == "cuda" and kept_tokens is None and not engine.recomputes:
                kept_tokens = engine.facts.numerics.micro_batch_tokens
            if "phases" in asked and self.has_time():
                shapes = [(load, each(load.tenants)) for load in preset.loads for each in (min, max)]
                yield "phases", [{"backend": backend, **measure_phases(engine, *each, device)} for each in shapes]
            if "memory" in asked and device == "cuda" and self.has_time():
                yield "memory", [measure_memory(engine, size, self.dtype)]
            del engine
            forget(device)
        if "by_hand" in asked and self.has_time():
            yield "by_hand", measure_by_hand(
                model, lambda: self.engine(model, backends[0], kept_tokens), preset.by_hand, dtype=self.dtype,
                device=device, mixed_tokens=preset.mixed_tokens, rounds=preset.rounds, until=self.until("by_hand"),
            )  # fmt: skip

    def engine(self, model: Path, backend: str, tokens: int | None = None) -> Engine:
        """Return an engine with the settings of the command line.

        If `tokens` is given, it is the size of micro-batches, and activations are not recomputed.
        """
        settings: dict[str, Any] = {"lora_backend": backend, "adapter_bytes": self.adapter_bytes(model.name)}
        if tokens is not None:
            settings |= {"micro_batch_tokens": tokens, "recompute": "never"}
        return Engine.load(str(model), device=self.args.device, dtype=self.dtype, **settings)

    def adapter_bytes(self, size: str) -> int | None:
        """Return the memory of all tenants' adapters on CUDA, limited to 0.4 of the device.

        Beyond that limit tenants run in shifts, which is visible in the number of forwards in the tables.
        """
        if self.args.device == "cpu":
            return None
        tenants = max(tenants for load in self.preset.loads for tenants in load.tenants)
        needed = int(1.01 * tenants * adapter_bytes(SHAPES[size], RANK, self.dtype))
        return min(needed, int(0.4 * torch.cuda.get_device_properties().total_memory))

    def until(self, part: str, parts: int = 1) -> float:
        """Return the time at which a part that starts now, one of `parts` like it, should stop."""
        return time.monotonic() + SHARE[part] * self.preset.limit_s / parts

    def has_time(self) -> bool:
        if time.monotonic() < self.began + self.preset.limit_s * SHARE["by_hand"]:
            return True
        print("out of time: the rest is left out (--parts measures it alone)", flush=True)
        return False


def measure_tenants(engine: Engine, load: Load, device: str, rounds: int, until: float) -> list[dict[str, Any]]:
    """Time cycles of every number of tenants in alternation; many and one have equal tokens."""
    forwards: dict[int, int] = {}

    def counted(work: Callable[[], CycleOutput], tenants: int) -> Work:
        def run() -> None:
            forwards[tenants] = work().forwards

        return run

    create_runs(engine, max(load.tenants))
    ways = {tenants: counted(cycle(engine, load, tenants), tenants) for tenants in load.tenants}
    took = fastest(ways, device, rounds=rounds, until=until)
    one = took[min(load.tenants)]
    return [
        {
            "tenants": tenants, "length": load.length, "tokens": load.tokens,
            "forwards": forwards[tenants], "wall_s": best.wall_s, "cpu_s": best.cpu_s,
            "tokens_per_s": load.tokens / best.wall_s, "many_over_one": best.wall_s / one.wall_s,
            "many_over_one_cpu": best.cpu_s / one.cpu_s,
        }
        for tenants, best in took.items()
    ]  # fmt: skip


def beside_ceiling(row: dict[str, Any], size: str, rates: Rates) -> dict[str, Any]:
    """Return a row with the ceiling of the machine and the reached share of it."""
    possible = ceiling(SHAPES[size], row["length"], RANK, rates, adapters=row["tenants"], tokens=row["tokens"])
    return row | {"ceiling_tokens_per_s": possible, "of_ceiling": row["tokens_per_s"] / possible}
