"""Record of a benchmark: facts about the machine, options and figures as JSON, and tables of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "peft", "redis", "fastapi", "uvicorn", "starlette", "httpx", "httpcore", "pydantic",
    "protobuf", "tinker", "opentelemetry-sdk",
)  # fmt: skip


class Report(dict[str, Any]):
    """Record of one run."""

    def __init__(self, name: str, args: argparse.Namespace, given: Sequence[str]) -> None:
        device = getattr(args, "device", None)
        command = shlex.join(["python", "-m", "bench", name, *given])
        super().__init__(machine={"command": command, **machine(device)}, shape=vars(args).copy())
        name = f"{name}-{device}" if device else name
        self.path: Path = args.out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"

    @property
    def is_filled(self) -> bool:
        """True if there are figures to write."""
        return len(self) > 2

    def write(self) -> None:
        """Write the record so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self, indent=1, default=str) + "\n")


def machine(device: str | None) -> dict[str, Any]:
    """Return date, hardware, load and versions; a device adds what torch reports."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": cpu_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **versions(),
    }
    if device:
        import torch

        if device == "cuda":
            facts["device"] = torch.cuda.get_device_name()
        else:
            facts["device"] += f" {torch.backends.cpu.get_cpu_capability()}"
        facts |= {"cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return facts


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a measurement depends on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Return the kernel's name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.machine()])[0]


def prepare_torch(threads: int) -> None:
    """Set torch's threads, 0 for its own choice, and silence transformers."""
    import torch
    import transformers

    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as `name=value` and return it."""
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> str:
    """Return rows as a Markdown table; missing values are dashes."""
    lines = ["| " + " | ".join(formats) + " |", "|" + "--:|" * len(formats)]
    for row in rows:
        cells = [form.format(row[name]) if name in row else "-" for name, form in formats.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
