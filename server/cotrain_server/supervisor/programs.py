"""Programs of a server, with their settings and shutdown."""

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
from cotrain_server.supervisor.environment import gpu_notice, gpu_variables, visible_gpus
from cotrain_server.supervisor.logs import reason_of_redis
from cotrain_server.supervisor.process import Program
from cotrain_store.disk.embedded_redis import check_log, find_redis_binary, redis_command
from cotrain_store.settings import PREFIX, WorkerSettings

API_GRACE_S = 10.0
SCHEDULER_GRACE_S = 5.0
REDIS_GRACE_S = 30.0
#: Each program has run normally for a while at this age.
REDIS_GOOD_RUN_S, LIGHT_GOOD_RUN_S = 1.0, 5.0
#: The API has the first metrics port.
SCHEDULER_PORT, WORKERS_PORT = 1, 2
#: Otherwise numpy starts a thread per core for matrix products, which neither API nor scheduler computes.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
#: Spin time of a worker's threads before they release their core. The default is so high that one
#: thread kept from its core by another process blocks all of them (docs/develop/benchmarks.md#rejected-attempts).
GIVES_WAY = {"GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Plan:
    """Server configuration from the command line."""

    base_models: tuple[str, ...]  # hub ids, folders, or NAME=FOLDER
    data_dir: Path
    redis_url: str | None  # None: start an embedded Redis
    given: Mapping[str, str]  # settings given by flag, by variable name without its prefix
    host: str = ""
    port: int = 0  # 0 selects a free port
    api_keys: tuple[str, ...] = ()
    """In the format of the API's settings. If none is given and none exists, one is created."""
    accept_data_loss: bool = False
    workers: int = 1  # per base model, if no GPUs are chosen
    worker_names: str = "w"  # prefix of a worker's id, followed by its number
    blobs: str = ""  # in the format of COTRAIN_BLOBS; empty: in the data folder
    gpus: tuple[str, ...] = ()
    """Names as in CUDA_VISIBLE_DEVICES, one worker on each. Empty: assign the visible GPUs in order."""

    group_size: int = 1  # processes of each worker, which share its base model

    @property
    def worker_models(self) -> tuple[str, ...]:
        """Base model of each worker, in turn. A base model keeps its worker ids if the number of workers changes."""
        models = self.base_models
        count = len(self.gpus) // self.group_size or self.workers * len(models)
        return tuple(models[number % len(models)] for number in range(count))


@dataclass(frozen=True)
class Programs:
    """Start commands of all processes."""

    plan: Plan
    folder: DataFolder
    redis_url: str
    lock: int | None = None  # lock of the data folder; None if the folder belongs to another host
    listener: int = -1

    def redis(self) -> Program:
        """Return the embedded Redis. It shuts down cleanly if its supervisor exits."""
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
            good_run_s=REDIS_GOOD_RUN_S,
            reason_of=partial(reason_of_redis, self.folder, binary),
        )

    @property
    def _inherited(self) -> tuple[int, ...]:
        return () if self.lock is None else (self.lock,)

    def workers(self, first_port: int = WORKERS_PORT) -> list[Program]:
        """Return the workers of every base model, each on its own GPU if there are enough."""
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
            replace(
                worker,
                environment={**worker.environment, **gpu_variables(number, names, size)},
                worker=(models[number].partition("=")[0], f"{self.plan.worker_names}{number}"),
            )
            for number, worker in enumerate(made)
        ]

    def _gpus_there(self) -> list[str]:
        return [] if self._setting("DEVICE") == "cpu" else visible_gpus()

    def _threads_of(self, processes: int) -> dict[str, str]:
        """Return an equal share of the cores for each process on a CPU, unless the operator sets a number."""
        if processes == 1 or self._setting("TORCH_THREADS") not in ("", "0"):
            return {}
        return {"TORCH_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}

    def gpu_notice(self) -> str | None:
        """Return a message if workers share a GPU or GPUs are unused, else None."""
        names = self.plan.gpus or self._gpus_there()
        return gpu_notice(len(self.plan.worker_models), names, self.plan.group_size)

    def scheduler(self) -> Program:
        """Return the scheduler."""
        return self._ours(
            "scheduler", "cotrain_scheduler", variables.SCHEDULER, SCHEDULER_GRACE_S,
            **self._metrics_port(SCHEDULER_PORT),
        )  # fmt: skip

    def metrics_targets(self) -> list[dict[str, Any]]:
        """Return the Prometheus targets in the format of `file_sd_configs`; empty without a port."""
        count = len(self.plan.worker_models)
        at = {
            "cotrain-api": [0],
            "cotrain-scheduler": [SCHEDULER_PORT],
            "cotrain-worker": range(WORKERS_PORT, WORKERS_PORT + count),
        }
        host = self._setting("METRICS_HOST") or "127.0.0.1"
        ports = {
            job: [f"{host}:{port}" for n in ns for port in self._metrics_port(n).values()] for job, ns in at.items()
        }
        targets = [{"targets": each, "labels": {"job": job}} for job, each in ports.items() if each]
        labels = {"job": "cotrain-fleet", "__metrics_path__": "/metrics/fleet"}
        return [*targets, {"targets": ports["cotrain-api"], "labels": labels}] if targets else []

    def _metrics_port(self, number: int) -> dict[str, str]:
        """Assign consecutive ports to the processes. Each process refuses a value that is not a number."""
        first = self._setting("METRICS_PORT")
        if not first.isdecimal() or not int(first):
            return {}
        return {"METRICS_PORT": str(int(first) + number)}

    def _setting(self, name: str) -> str:
        return self.plan.given.get(name) or os.environ.get(f"{PREFIX}{name}", "")

    def api(self) -> Program:
        """Return the API. It listens on the supervisor's socket, so a restart refuses no connection."""
        names = ",".join(base_model.partition("=")[0] for base_model in self.plan.base_models)
        api = self._ours(
            "api",
            "cotrain_server",
            variables.API,
            API_GRACE_S,
            BASE_MODELS=names,
            HOST=self.plan.host,
            PORT=str(self.plan.port),
            # Passed by environment, which other users of this host cannot read.
            API_KEYS=",".join(self.plan.api_keys),
            **self._metrics_port(0),
        )
        command = [*api.command, "--listen-fd", str(self.listener)]
        return replace(api, command=command, pass_fds=(*self._inherited, self.listener))

    def _ours(self, name: str, module: str, known: frozenset[str], grace_s: float, **own: str) -> Program:
        shared = {
            "REDIS_URL": self.redis_url,
            "REDIS_PASSWORD_FILE": "",  # already in the URL
            "DATA_DIR": str(self.folder.path),
            "ACCEPT_DATA_LOSS": str(self.plan.accept_data_loss).lower(),
            # Only the API receives keys, all in one variable.
            "API_KEYS": "",
            "API_KEYS_FILE": "",
        }
        # -P: a file in the current folder must not be imported as a module.
        command = [sys.executable, "-P", "-m", module]
        given = {**self.plan.given, **shared, **own}
        threads = GIVES_WAY if known is variables.WORKER else ONE_THREAD
        environment = {**threads, **variables.environment(known, given)}
        made = Program(name, command, environment, grace_s, pass_fds=self._inherited)
        return made if known is variables.WORKER else replace(made, good_run_s=LIGHT_GOOD_RUN_S)

    def _worker_grace_s(self) -> float:
        """Return the drain time that a worker plans: the end of its cycle, and snapshots."""
        try:
            settings = WorkerSettings(
                redis_url=self.redis_url, redis_password_file=None, data_dir=self.folder.path, base_model=""
            )
        except ValidationError:  # the worker reports the error
            settings = WorkerSettings.model_construct()
        return settings.stop_grace_s
