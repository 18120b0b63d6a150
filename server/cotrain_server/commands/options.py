"""Shared options of the commands, and their errors."""

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from cotrain_server.supervisor.environment import UnfitGpus, check_group_gpus, parse_gpus, visible_gpus, with_password
from cotrain_store.blobs.opening import check_url
from cotrain_store.disk.model_folder import has_tokenizer, why_not_served
from cotrain_store.process_start import LAST_PORT
from cotrain_store.settings import PREFIX

NEWER_PYTHON = (3, 14)
DEFAULT_DATA_DIR = Path.home() / ".cotrain"

DataDir = Annotated[Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where everything durable is kept.")]


def _opened(redis_url: str | None) -> str | None:
    try:
        return with_password(redis_url)
    except ValueError as mistake:
        refuse(str(mistake))


def _redis(text: str, **more: Any) -> Any:
    return typer.Option(envvar="COTRAIN_REDIS_URL", callback=_opened, help=text, **more)


RedisUrl = Annotated[str | None, _redis("Use this Redis; by default one is started.")]
ServersRedisUrl = Annotated[str | None, _redis("The server's Redis; by default the one in its folder.")]
JoinedRedisUrl = Annotated[str | None, _redis("Needed: the Redis that the server uses.", show_default=False)]
JoinedDataDir = Annotated[
    Path | None,
    typer.Option(envvar="COTRAIN_DATA_DIR", help="Needed: the server's data folder, mounted here.", show_default=False),
]
BaseModels = Annotated[
    list[str] | None,
    typer.Option(
        envvar=["COTRAIN_BASE_MODELS", "COTRAIN_BASE_MODEL"],
        help="Needed: hub id, folder, or NAME=FOLDER. Repeat it for several base models.",
        show_default=False,
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(envvar="COTRAIN_DEVICE")]
Workers = Annotated[
    int, typer.Option(envvar="COTRAIN_WORKERS", min=1, help="Worker processes per base model, on a CPU.")
]
Gpus = Annotated[
    str | None,
    typer.Option(
        envvar="COTRAIN_GPUS",
        help="A worker on each of these GPUs (with --group-size on so many), dealt out to the base models in turn: `all`, "
        "or `0,2`. "
        "By default one worker per base model.",
    ),
]
GroupSize = Annotated[
    int,
    typer.Option(
        envvar="COTRAIN_GROUP_SIZE",
        min=1,
        max=64,
        help="Processes per worker that hold its base model together, a part each: for one that is too large for one "
        "GPU.",
    ),
]
TorchThreads = Annotated[
    int,
    typer.Option(
        envvar="COTRAIN_TORCH_THREADS", help="CPU threads per process of a worker; 0: all, divided between them."
    ),
]
LogLevel = Annotated[str, typer.Option(envvar="COTRAIN_LOG_LEVEL")]


def named_base_models(given: list[str] | None, command: str) -> tuple[str, ...]:
    """Return the values of `--base-model` with absolute folder paths, because processes start in another folder."""
    if not given:
        refuse(
            f"Which base model? `cotrain {command} --base-model Qwen/Qwen3-0.6B`, a folder instead of "
            "that name, or COTRAIN_BASE_MODEL."
        )
    return tuple(_base_model(name) for names in given for name in names.split(","))


def _base_model(name: str) -> str:
    alias, _, source = name.rpartition("=")
    if not Path(source).exists():
        if source.startswith((".", "/", "~")):
            refuse(f"There is no folder {source}.")
        return name
    if reason := why_not_served(source):
        refuse(f"Base model {source} cannot be served: {reason}")
    if not has_tokenizer(source):
        say(f"{source} has no tokenizer (tokenizer.json): requests with text are refused, requests with tokens are not")
    folder = str(Path(source).resolve())
    return f"{alias}={folder}" if alias else folder


def chosen_gpus(gpus: str | None, device: str, workers: int, base_models: int, group_size: int = 1) -> tuple[str, ...]:
    """Return the GPUs of `--gpus`. Refuse options that exclude each other."""
    if gpus is None and workers > 1 and device != "cpu" and visible_gpus():
        refuse(
            f"--workers {workers} is for a CPU, and this host has GPUs: --gpus all has a worker on each, "
            "--device cpu uses none."
        )
    if gpus is not None and (device == "cpu" or workers > 1):
        with_it = "--device cpu" if device == "cpu" else f"--workers {workers}"
        refuse(f"--gpus {gpus} and {with_it} exclude each other: there is one worker per GPU.")
    try:
        if gpus is not None:
            return parse_gpus(gpus, base_models, visible_gpus(), group_size)
        if device != "cpu":
            check_group_gpus(base_models, visible_gpus(), group_size)
    except UnfitGpus as unfit:
        refuse(str(unfit))
    return ()


def checked_port(port: int) -> int:
    """Return a valid port. Exit for any other number."""
    if not 0 <= port <= LAST_PORT:
        refuse(f"--port, COTRAIN_PORT: {port} is no port. Give 1 to {LAST_PORT}, or 0 for a free one.")
    return port


def check_metrics_ports(processes: int) -> None:
    """Exit if the first metrics port leaves no valid port for the last process."""
    given = os.environ.get(f"{PREFIX}METRICS_PORT", "")
    if not given.isdecimal() or not int(given):  # each process refuses a value that is not a number
        return
    most = LAST_PORT - processes + 1
    if int(given) > most:
        refuse(
            f"{PREFIX}METRICS_PORT: {given} is too high. {processes} processes here have a port each, one behind "
            f"the other: give 1 to {most}, or 0 for none."
        )


def samples_nothing(group_size: int) -> str | None:
    """Return a warning if worker groups will refuse samples, else None. A vLLM server can sample for them."""
    if group_size == 1 or os.environ.get("COTRAIN_SAMPLER") == "vllm":
        return None
    return (
        "groups train and do not sample: sample requests are refused, unless a vLLM server does it "
        "(COTRAIN_SAMPLER=vllm, COTRAIN_VLLM_URL)"
    )


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    _say_why(message)
    sys.exit(1)


def check_python(version: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Exit on a Python version that the server's libraries are untested on. The client supports newer ones."""
    if version >= NEWER_PYTHON:
        refuse(
            f"The server runs on Python 3.11 to 3.13, and this is {version[0]}.{version[1]}. Make its "
            "environment with one of those; the client alone runs here."
        )


def refuse(message: str) -> NoReturn:
    """Print a usage error and exit with EX_USAGE."""
    _say_why(message)
    sys.exit(os.EX_USAGE)


def _say_why(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(message))


def say(line: str) -> None:
    """Print a line of the supervisor with the time, for a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[dim]{datetime.now():%H:%M:%S}[/dim] {escape(line)}")


def chosen_blobs() -> str:
    """Return COTRAIN_BLOBS, which every process receives. Exit if it is not a valid address."""
    url = os.environ.get(f"{PREFIX}BLOBS", "")
    try:
        if url:
            check_url(url)
    except ValueError as error:
        refuse(f"{PREFIX}BLOBS: {error}")
    return url.rstrip("/")
