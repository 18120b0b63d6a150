"""`cotrain worker`: workers of a server whose Redis, API and scheduler run elsewhere."""

import asyncio
import re
import socket
from typing import Annotated

import typer

from cotrain_server.commands import options
from cotrain_server.supervisor.data_folder import UnusableFolder
from cotrain_server.supervisor.environment import refused_variables
from cotrain_server.supervisor.process import CannotServe
from cotrain_server.supervisor.programs import Plan
from cotrain_server.supervisor.supervisor import Supervisor
from cotrain_store.blobs.opening import MARK

#: Maximum length of a worker id before its number.
MAX_CHARACTERS = 56


def worker(
    base_model: options.BaseModels = None,
    redis_url: options.JoinedRedisUrl = None,
    data_dir: options.JoinedDataDir = None,
    name: Annotated[
        str | None, typer.Option(help="What its worker ids begin with; by default this host's name.")
    ] = None,
    device: options.Device = "auto",
    workers: options.Workers = 1,
    gpus: options.Gpus = None,
    group_size: options.GroupSize = 1,
    torch_threads: options.TorchThreads = 0,
    log_level: options.LogLevel = "info",
) -> None:
    """Join a server from another host: run only workers, and restart them when they crash.

    Use the server's Redis (--redis-url redis://:PASSWORD@HOST:6379/0, or the password in
    COTRAIN_REDIS_PASSWORD_FILE) and its data folder, which contains snapshots and checkpoints.

    Every other setting of a worker is a COTRAIN_* variable, and must equal that of the server's workers.

    Examples:

    cotrain worker --base-model Qwen/Qwen3-8B --redis-url redis://head:6379/0 --data-dir /mnt/cotrain --gpus all
    """
    if refused := refused_variables():
        options.refuse(" ".join(refused))
    base_models = options.named_base_models(base_model, "worker")
    if redis_url is None:
        options.refuse("Which Redis? --redis-url, or COTRAIN_REDIS_URL: the one that the server uses.")
    if data_dir is None:
        options.refuse(
            "Which data folder? --data-dir, or COTRAIN_DATA_DIR: the server's, mounted here; with COTRAIN_BLOBS "
            "one of this host's own."
        )
    blobs = options.chosen_blobs()
    if not blobs and not (data_dir / MARK).is_file():
        options.refuse(
            f"{data_dir} is no server's data folder: it has no file {MARK}. Mount the one that the server "
            "uses; it has that file once the server has started."
        )
    plan = Plan(
        base_models=base_models,
        data_dir=data_dir.absolute(),
        redis_url=redis_url,
        given={"DEVICE": device, "TORCH_THREADS": str(torch_threads), "LOG_LEVEL": log_level},
        workers=workers,
        blobs=blobs,
        gpus=options.chosen_gpus(gpus, device, workers, len(base_models), group_size),
        group_size=group_size,
        worker_names=f"{_prefix_of(socket.gethostname() if name is None else name)}-w",
    )
    options.check_metrics_ports(len(plan.worker_models))
    if notice := options.samples_nothing(group_size):
        options.say(notice)
    try:
        asyncio.run(Supervisor(plan, options.say, lambda *_: None).join())
    except (CannotServe, UnusableFolder) as error:
        options.refuse(str(error))


def _prefix_of(host: str) -> str:
    """Return the prefix of worker ids for a host's name. Pure."""
    fit = re.sub(r"[^A-Za-z0-9_-]+", "-", host.partition(".")[0]).strip("-_")
    return fit[:MAX_CHARACTERS] or "host"
