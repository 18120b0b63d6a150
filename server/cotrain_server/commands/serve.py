"""`cotrain serve`: a whole server on this host, in one command."""

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from cotrain_server.commands import options
from cotrain_server.settings import ADMIN_KEY_FILE, split_words
from cotrain_server.supervisor.data_folder import FolderInUse, UnsafeFolder, UnusableFolder
from cotrain_server.supervisor.environment import refused_variables
from cotrain_server.supervisor.process import CannotServe
from cotrain_server.supervisor.programs import WORKERS_PORT, Plan
from cotrain_server.supervisor.supervisor import Supervisor
from cotrain_store.disk.embedded_redis import NoRedisFound
from cotrain_store.errors import InvalidKey, UnsafeRedis
from cotrain_store.process_start import CannotListen
from cotrain_store.settings import PREFIX
from cotrain_store.tenants.api_keys import read_chosen_keys

console = Console(highlight=False, soft_wrap=True)

REFUSALS = (FolderInUse, UnsafeFolder, UnusableFolder, CannotListen, NoRedisFound, UnsafeRedis, CannotServe)


def serve(
    base_model: options.BaseModels = None,
    host: Annotated[
        str,
        typer.Option(
            envvar="COTRAIN_HOST", help="Listen on this address. 0.0.0.0 is all of IPv4, :: all of IPv4 and IPv6."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="COTRAIN_PORT", callback=options.checked_port, help="0: a free one.")
    ] = 8000,
    data_dir: options.DataDir = options.DEFAULT_DATA_DIR,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="COTRAIN_API_KEYS",
            help="Accept this key (tml-… or sk-…, or NAME=KEY); repeat it for several tenants. By default one is made.",
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(envvar="COTRAIN_API_KEYS_FILE", help="Accept the keys in this file, too; -: standard input."),
    ] = None,
    clock_mode: Annotated[
        Literal["eager", "metronome"],
        typer.Option(envvar="COTRAIN_CLOCK_MODE", help="When a cycle starts: at once, or on a beat."),
    ] = "eager",
    clock_period_s: Annotated[
        float, typer.Option(envvar="COTRAIN_CLOCK_PERIOD_S", help="Longest wait of a small request, or the beat.")
    ] = 10.0,
    device: options.Device = "auto",
    workers: options.Workers = 1,
    gpus: options.Gpus = None,
    group_size: options.GroupSize = 1,
    torch_threads: options.TorchThreads = 0,
    redis_url: options.RedisUrl = None,
    accept_data_loss: Annotated[
        bool, typer.Option(envvar="COTRAIN_ACCEPT_DATA_LOSS", help="Take a Redis that may lose writes.")
    ] = False,
    log_level: options.LogLevel = "info",
) -> None:
    """Serve base models on this host: Redis, API, scheduler and workers in one command.

    Every option is also a COTRAIN_* variable, and so is every other setting of these processes.

    Examples:

    cotrain serve --base-model Qwen/Qwen3-0.6B

    cotrain serve --base-model my-model=/models/mine --host 0.0.0.0 --clock-mode metronome

    cotrain serve --base-model Qwen/Qwen3-8B --gpus all

    cotrain serve --base-model meta-llama/Llama-3.3-70B-Instruct --gpus all --group-size 8
    """
    options.check_python()
    if refused := refused_variables():
        options.refuse(" ".join(refused))
    base_models = options.named_base_models(base_model, "serve")
    keys_given = split_words(",".join(api_key or ()))
    _hide_keys(keys_given)
    try:
        api_keys = _all_keys(keys_given, api_keys_file)
    except (InvalidKey, OSError) as error:
        options.refuse(f"--api-key: {error}")
    given = {
        "CLOCK_MODE": clock_mode,
        "CLOCK_PERIOD_S": str(clock_period_s),
        "DEVICE": device,
        "TORCH_THREADS": str(torch_threads),
        "LOG_LEVEL": log_level,
    }
    plan = Plan(
        base_models=base_models,
        host=host[1:-1] if host.startswith("[") and host.endswith("]") else host,  # as in a URL
        port=port,
        data_dir=data_dir.absolute(),
        redis_url=redis_url,
        api_keys=api_keys,
        accept_data_loss=accept_data_loss,
        given=given,
        workers=workers,
        blobs=options.chosen_blobs(),
        gpus=options.chosen_gpus(gpus, device, workers, len(base_models), group_size),
        group_size=group_size,
    )
    options.check_metrics_ports(WORKERS_PORT + len(plan.worker_models))
    if notice := options.samples_nothing(group_size):
        options.say(notice)
    try:
        asyncio.run(Supervisor(plan, options.say, partial(_announce, plan.data_dir)).run())
    except REFUSALS as error:
        options.refuse(str(error))


def _announce(data_dir: Path, address: str, new_key: str | None) -> None:
    if new_key:
        console.print(f"API key, shown only now: [bold]{new_key}[/bold]")
    console.print(f"[bold green]cotrain ready at {address}[/bold green]")
    is_set = os.environ.get(f"{PREFIX}ADMIN_KEY")
    key = "the key in COTRAIN_ADMIN_KEY" if is_set else f"the admin key in {data_dir / ADMIN_KEY_FILE}"
    console.print(f"Dashboard: {address}/ui")
    console.print(f"Log in with {key}, or as a tenant with its API key.")


def _hide_keys(keys: Sequence[str]) -> None:
    """Restart this command with `keys` in its environment, if any are among its arguments.

    Every user of the host can read the arguments (`ps`) while the process runs.
    """
    arguments = _without_option(sys.orig_argv[1:], "--api-key")
    if len(arguments) == len(sys.orig_argv) - 1:
        return
    environment = {**os.environ, "COTRAIN_API_KEYS": ",".join(keys)}
    os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606  # ourselves


def _without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return arguments without an option and its values, written `--option VALUE` or `--option=VALUE`."""
    is_value = [False, *(argument == option for argument in arguments)]
    return [
        argument
        for argument, of_option in zip(arguments, is_value, strict=False)
        if not of_option and argument != option and not argument.startswith(f"{option}=")
    ]


def _all_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the given keys and those of a file (`-`: standard input).

    Raises:
        InvalidKey: a key is malformed, or too easy to guess.
        OSError: the file cannot be read.
    """
    text = "" if file is None else sys.stdin.read() if str(file) == "-" else file.read_text()
    keys = (*given, *split_words(text))
    read_chosen_keys(keys)
    return keys
