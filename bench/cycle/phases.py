"""Time of a cycle by phase, measured with torch's profiler: the time of ops on CPU, of kernels on CUDA.

LoRA products differ from those of the base in their shapes. Head and optimizer are identified by the calls that
contain them. The remaining wall time belongs to the host: Python, or waiting for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch does not list it
from torch.profiler import ProfilerActivity, profile, record_function

from bench.cycle.load import RANK, Load, create_runs, cycle
from bench.support.timing import Work, timed
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.heads import Head

PHASES = ("embed", "attention", "base GEMM", "LoRA", "elementwise", "head", "optimizer", "host")
HEAD, WAVE, WHOLE = "cotrain: head", "cotrain: wave", "cotrain: cycle"
GEMMS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
#: Rank of one adapter or of modules that share an input; no other side of a matrix is this short.
RANKS = (RANK, 2 * RANK, 3 * RANK)
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Op:
    """One op as recorded by the profiler."""

    name: str
    shapes: Sequence[Sequence[int]]  # shapes of its tensors
    in_head: bool
    in_wave: bool


def phase_of(op: Op) -> str:
    if not op.in_wave:
        return "optimizer"
    if op.in_head:
        return "head"
    if op.name == "aten::embedding":
        return "embed"
    if "attention" in op.name or "varlen" in op.name or "flash" in op.name:
        return "attention"
    if op.name.startswith("cotrain::lora_expand"):
        return "base GEMM"  # LoRA is fused with it
    if op.name.startswith("cotrain::lora_"):
        return "LoRA"
    if op.name in GEMMS:
        matrices = [shape for shape in op.shapes if len(shape) >= 2]
        is_low = any(side in RANKS for shape in matrices for side in shape[-2:])
        return "LoRA" if is_low else "base GEMM"
    return "elementwise"


def measure_phases(engine: Engine, load: Load, tenants: int, device: str) -> dict[str, Any]:
    """Profile one cycle; return milliseconds by phase, and on CUDA launches and waits."""
    create_runs(engine, tenants)
    work = cycle(engine, load, tenants)
    plain_s = min(timed(work, device) for _ in range(2))
    events, wall_s = profiled(work, device)
    spent, calls = add_up(events, device)
    spent["host"] = max(0.0, 1e3 * wall_s - sum(spent.values()))
    row: dict[str, Any] = {
        "tenants": tenants, "length": load.length, "ms": spent, "wall_ms": 1e3 * plain_s, "profiled_ms": 1e3 * wall_s,
        "ops": calls,
    }  # fmt: skip
    if device == "cuda":
        names = Counter(event.name for event in events)
        row["launches"] = sum(names[name] for name in LAUNCHES)
        row["waits"] = sum(names[name] for name in WAITS)
    return row


def profiled(work: Work, device: str) -> tuple[Sequence[Any], float]:
    """Return the profiler's events of one call, and its wall time in seconds.

    The time comes from the profiler, like those of the events, because its clock differs from Python's.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with (
        patch.object(Head, "run", ranged(Head.run, HEAD)),
        patch.object(ForwardBackward, "run", ranged_steps(ForwardBackward.run, WAVE)),
        profile(activities=activities, record_shapes=True) as profiler,
    ):
        ranged(timed, WHOLE)(work, device)
    events = profiler.events()
    (whole,) = [event for event in events if event.name == WHOLE and is_host(event)]
    return events, whole.time_range.elapsed_us() / 1e6


def ranged(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function inside a range of the profiler."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return run


def ranged_steps(function: Callable[..., Yielding[Any]], name: str) -> Callable[..., Yielding[Any]]:
    """Return the same generator with each step, up to its next yield point, inside a range of the profiler."""

    def run(*args: Any, **kwargs: Any) -> Yielding[Any]:
        work = function(*args, **kwargs)
        while True:
            with record_function(name):
                try:
                    next(work)
                except StopIteration as end:
                    return end.value
            yield

    return run


def add_up(events: Sequence[Any], device: str) -> tuple[dict[str, float], int]:
    """Return milliseconds by phase and the number of ops. Events are torch's `FunctionEvent`."""
    # By time, because backward runs in a thread of its own on CUDA, outside of any range.
    waves = [event.time_range for event in events if event.name == WAVE and is_host(event)]
    spent, calls = dict.fromkeys(PHASES, 0.0), 0
    for event in events:
        # An op that computes; autograd's nodes and ranges are Python.
        if not is_host(event) or "::" not in event.name or event.name.startswith("autograd::"):
            continue
        shapes = [shape for shape in event.input_shapes or [] if shape]
        in_wave = any(wave.start <= event.time_range.start <= wave.end for wave in waves)
        own_us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        spent[phase_of(Op(event.name, shapes, is_in_head(event), in_wave))] += own_us / 1e3
        calls += 1
    return spent, calls


def is_host(event: Any) -> bool:
    """Return True if an event is an op on the host, not a kernel."""
    return bool(event.device_type == DeviceType.CPU)


def is_in_head(event: Any) -> bool:
    """Return True if an event happened within the head's range of the same thread."""
    while (event := event.cpu_parent) is not None:
        if event.name == HEAD:
            return True
    return False
