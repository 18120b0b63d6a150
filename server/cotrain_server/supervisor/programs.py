"""What a server consists of: which programs, with which settings, and how each is ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cotrain_server.supervisor import environment as variables
from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.gpus import gpus, notice, variables_of
from cotrain_server.supervisor.process import Program
from cotrain_server.supervisor.redis_log import reason_of_redis
from cotrain_store.redis_client.embedded_server import (
    check_log,
    find_redis_binary,
    redis_command,
)
from cotrain_store.settings.store import PREFIX
from cotrain_store.settings.worker import WorkerSettings

API_GRACE_S = 10.0
SCHEDULER_GRACE_S = 5.0
REDIS_GRACE_S = 30.0
#: Each has done its work for a while by then.
REDIS_GOOD_LIFE_S, LIGHT_GOOD_LIFE_S = 1.0, 5.0
#: The API has the first metrics port.
SCHEDULER_PORT, WORKERS_PORT = 1, 2
#: Else numpy keeps a thread per core for products of matrices, which neither API nor scheduler makes.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
#: How long a worker's threads wait for one another before they give their core away. By default so long that
#: one which another process keeps from its core holds all of them (docs/performance.md, What was tried).
GIVES_WAY = {"GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Plan:
    """What to serve, decided from the command line."""

    base_models: tuple[str, ...]
    """Hub ids, folders, or NAME=FOLDER."""
    host: str
    port: int
    """0 takes a free one."""
    data_dir: Path
    redis_url: str | None
    """None: start our own Redis."""
    api_keys: tuple[str, ...]
    """As the API's settings have them. None given and none known: one is made."""
    accept_data_loss: bool
    given: Mapping[str, str]
    """Settings given by flag, by variable name without its prefix."""
    workers: int = 1
    """Per base model, where no GPUs are chosen."""
    worker_names: str = "w"
    """What a worker's id begins with; its number follows."""
    blobs: str = ""
    """As COTRAIN_BLOBS; empty: in the data folder."""
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them: a worker on each. None chosen: one after the other, as far as there are."""

    group_size: int = 1
    """Processes of each worker, which hold its base model together."""

    @property
    def worker_models(self) -> tuple[str, ...]:
        """The base model of each worker, in turn: one that has another number of workers keeps those ids it had."""
        models = self.base_models
        count = len(self.gpus) // self.group_size or self.workers * len(models)
        return tuple(models[number % len(models)] for number in range(count))


@dataclass(frozen=True)
class Programs:
    """How each process is started."""

    plan: Plan
    folder: DataFolder
    redis_url: str
    lock: int | None = None
    """Of the data folder; None where the folder is another host's."""
    listener: int = -1

    def redis(self) -> Program:
        """Make the embedded Redis; when its supervisor is gone it ends in good order."""
        binary = find_redis_binary()
        check_log(binary, self.folder.redis)
        command = redis_command(binary, self.folder.redis, self.folder.socket())
        return Program(
            "redis",
            command,
            variables.environment(frozenset(), {}),
            REDIS_GRACE_S,
            death_signal=signal.SIGTERM,
            pass_fds=self._inherited,
            good_life_s=REDIS_GOOD_LIFE_S,
            reason_of=partial(reason_of_redis, self.folder, binary),
        )

    @property
    def _inherited(self) -> tuple[int, ...]:
        return () if self.lock is None else (self.lock,)

    def workers(self, first_port: int = WORKERS_PORT) -> list[Program]:
        """Make the workers of every base model; on GPUs each on one of its own while there are as many."""
        models, names = self.plan.worker_models, self.plan.gpus or self._gpus_there()
        size = self.plan.group_size
        threads = {} if names else self._threads_of(len(models) * size)
        made = [
            self._ours(
                f"worker-{self.plan.worker_names}{number}",
                "cotrain_workers",
                variables.WORKER,
                self._worker_grace_s(),
                BASE_MODEL=base_model,
                WORKER_ID=f"{self.plan.worker_names}{number}",
                WORKERS_ON_HOST=str(len(models)),
                GROUP_SIZE=str(size),
                **threads,
                **self._metrics_port(first_port + number),
            )
            for number, base_model in enumerate(models)
        ]
        return [
            replace(worker, environment={**worker.environment, **variables_of(number, names, size)})
            for number, worker in enumerate(made)
        ]

    def _gpus_there(self) -> list[str]:
        return [] if self._setting("DEVICE") == "cpu" else gpus()

    def _threads_of(self, processes: int) -> dict[str, str]:
        """Give each process on a CPU its part of the cores, unless the operator says how many."""
        if processes == 1 or self._setting("TORCH_THREADS") not in ("", "0"):
            return {}
        return {"TORCH_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}

    def gpu_notice(self) -> str | None:
        """Say that workers share a GPU, or that some are left over; None if neither."""
        names = self.plan.gpus or self._gpus_there()
        return notice(len(self.plan.worker_models), names, self.plan.group_size)

    def scheduler(self) -> Program:
        """Make the scheduler."""
        return self._ours(
            "scheduler", "cotrain_scheduler", variables.SCHEDULER, SCHEDULER_GRACE_S,
            **self._metrics_port(SCHEDULER_PORT),
        )  # fmt: skip

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Name what a Prometheus scrapes, as its `file_sd_configs` have it; nothing without a port."""
        count = len(self.plan.worker_models)
        at = {
            "cotrain-api": [0],
            "cotrain-scheduler": [SCHEDULER_PORT],
            "cotrain-worker": range(WORKERS_PORT, WORKERS_PORT + count),
        }
        host = self._setting("METRICS_HOST") or "127.0.0.1"
        ports = {
            job: [f"{host}:{port}" for n in ns for port in self._metrics_port(n).values()]
            for job, ns in at.items()
        }
        targets = [{"targets": each, "labels": {"job": job}} for job, each in ports.items() if each]
        labels = {"job": "cotrain-fleet", "__metrics_path__": "/metrics/fleet"}
        return [*targets, {"targets": ports["cotrain-api"], "labels": labels}] if targets else []

    def _metrics_port(self, number: int) -> dict[str, str]:
        """Give each process a port of its own, one behind the other; what is no number is refused by each."""
        first = self._setting("METRICS_PORT")
        if not first.isdecimal() or not int(first):
            return {}
        return {"METRICS_PORT": str(int(first) + number)}

    def _setting(self, name: str) -> str:
        return self.plan.given.get(name) or os.environ.get(f"{PREFIX}{name}", "")

    def api(self) -> Program:
        """Make the API. It listens on our socket, so that a restart of it refuses no connection."""
        names = ",".join(base_model.partition("=")[0] for base_model in self.plan.base_models)
        api = self._ours(
            "api",
            "cotrain_server",
            variables.API,
            API_GRACE_S,
            BASE_MODELS=names,
            HOST=self.plan.host,
            PORT=str(self.plan.port),
            # By its environment, which other users of this host cannot read.
            API_KEYS=",".join(self.plan.api_keys),
            **self._metrics_port(0),
        )
        command = [*api.command, "--listen-fd", str(self.listener)]
        return replace(api, command=command, pass_fds=(*self._inherited, self.listener))

    def _ours(
        self, name: str, module: str, known: frozenset[str], grace_s: float, **own: str
    ) -> Program:
        shared = {
            "REDIS_URL": self.redis_url,
            "REDIS_PASSWORD_FILE": "",  # in the URL by now
            "DATA_DIR": str(self.folder.path),
            "ACCEPT_DATA_LOSS": str(self.plan.accept_data_loss).lower(),
            # The API alone gets them, all in one variable.
            "API_KEYS": "",
            "API_KEYS_FILE": "",
        }
        # -P: a file of the folder we were started in must not be taken for a module.
        command = [sys.executable, "-P", "-m", module]
        given = {**self.plan.given, **shared, **own}
        threads = GIVES_WAY if known is variables.WORKER else ONE_THREAD
        environment = {**threads, **variables.environment(known, given)}
        made = Program(name, command, environment, grace_s, pass_fds=self._inherited)
        return made if known is variables.WORKER else replace(made, good_life_s=LIGHT_GOOD_LIFE_S)

    def _worker_grace_s(self) -> float:
        """Read what a worker plans its drain by: the end of its cycle, and recovery copies."""
        try:
            settings = WorkerSettings(
                redis_url=self.redis_url,
                redis_password_file=None,
                data_dir=self.folder.path,
                base_model="",
            )
        except ValidationError:  # the worker says what is wrong
            settings = WorkerSettings.model_construct()
        return settings.stop_grace_s
