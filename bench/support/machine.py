"""Facts about the machine of a benchmark, and printing of its rows."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import torch
import transformers


def machine(device: str) -> dict[str, Any]:
    """Return command, date, hardware, versions and load; also print them."""
    is_cuda = device == "cuda"
    facts = {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if is_cuda else cpu_name(),
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
    show(facts)
    return facts


def cpu_name() -> str:
    """Return the kernel's name of the processor, and the instruction set that torch uses."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]} {torch.backends.cpu.get_cpu_capability()}"


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as `name=value` and return it."""
    print(
        "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
        flush=True,
    )
    return row
