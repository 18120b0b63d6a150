"""Record of a scenario: its options, and its figures as JSON with facts about the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

Args = argparse.Namespace
#: Default of each option, or (default, help). A type in place of a default: the option has none.
Options = Mapping[str, Any]
PACKAGES = (
    "torch", "triton", "transformers", "peft", "redis", "fastapi", "uvicorn", "starlette", "httpx", "httpcore", "pydantic",
    "protobuf", "tinker", "opentelemetry-sdk",
)  # fmt: skip


class Choice(NamedTuple):
    """One of some values."""

    values: Sequence[str]
    is_required: bool = False


class Some(NamedTuple):
    """Comma-separated list of some values; all by default."""

    values: Sequence[str]


DEVICE: Options = {
    "device": Choice(("cpu", "cuda"), is_required=True),
    "threads": (0, "of torch; 0: its own choice"),
    "models": (Path, "folder that keeps the random models between calls"),
}


class Report(dict[str, Any]):
    """Record of one run, written if figures were added."""

    def __init__(self, name: str, args: Args, given: Sequence[str]) -> None:
        device = getattr(args, "device", None)
        command = shlex.join(["python", "-m", "bench", name, *given])
        super().__init__(machine={"command": command, **machine(device)}, shape=vars(args).copy())
        name = f"{name}-{device}" if device else name
        self.path: Path = args.out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"

    @property
    def is_filled(self) -> bool:
        return len(self) > 2

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self, indent=1, default=str) + "\n")


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    for name, given in {**options, "out": (Path("bench/results"), "folder of the record")}.items():
        default, text = given if type(given) is tuple else (given, None)
        parser.add_argument(f"--{name.replace('_', '-')}", **described(default, text))


def described(default: Any, text: str | None) -> dict[str, Any]:
    """Return the arguments of `add_argument` for one option."""
    kind: Callable[[str], Any]
    match default:
        case Choice(values, is_required):
            return {"choices": tuple(values), "required": is_required, "help": text}
        case Some(values):
            listed = f"some of {', '.join(values)} (default: all)"
            return {"type": some_of(values), "default": list(values), "help": listed}
        case False:
            return {"action": "store_true", "help": text}
        case [int(), *_]:
            kind, shown = lambda given: [int(number) for number in given.split(",")], ",".join(map(str, default))
        case [str(), *_]:
            kind, shown = names, ",".join(default)
        case _ if callable(default):
            return {"type": default, "help": text}
        case _:
            kind, shown = type(default), default
    return {"type": kind, "default": default, "help": f"{text or ''} (default: {shown})".lstrip()}


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def some_of(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated lists that refuses other values."""

    def parse(text: str) -> list[str]:
        for name in names(text):
            if name not in values:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(values)}")
        return names(text)

    return parse


def machine(device: str | None) -> dict[str, Any]:
    """Return date, hardware, load and versions; a device adds what torch reports."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": cpu_name(), "cpus": os.cpu_count(),
        "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    if device:
        import torch

        is_cuda = device == "cuda"
        model = torch.cuda.get_device_name() if is_cuda else f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
        facts |= {"device": model, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return facts


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.machine()])[0]


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
    print("  ".join(f"{name}={shown(value)}" for name, value in row.items()), flush=True)
    return row


def shown(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(each)}" for name, each in value.items()) + "}"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
