"""Launcher of the members of a group with torchrun.

torchrun's agent starts, watches and ends the processes. The launcher converts their exit codes to one for a
supervisor.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable

import structlog
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cotrain_workers.engine.device import EXIT_CODE

log = structlog.get_logger()

HERE = "127.0.0.1"
PR_SET_PDEATHSIG = 1
#: Time in s for the other members to end after one has crashed. Their state is replayed.
LAST_S = 3
#: Exit codes with a meaning for a supervisor; any other end is a crash.
_KNOWN_CODES = (2, EXIT_CODE)


def launch(size: int, member: Callable[[], None]) -> int:
    """Run `member` in `size` processes until all have returned, and return an exit code.

    The processes are forked, so that libraries are imported once. Call it before any use of a device. A stop
    signal is for the first member, which ends the others. The crash of a member ends all members.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _pass_on)
    with tempfile.TemporaryDirectory(prefix="cotrain-group-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{HERE}:0",
            local_addr=HERE,
            max_restarts=0,  # a supervisor decides on restarts
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
            shutdown_timeout=LAST_S,
        )
        try:
            elastic_launch(config, _tied)(os.getpid(), member)
        except ChildFailedError as failed:
            codes = {failure.exitcode for failure in failed.failures.values()}
            log.error("group_ended", exit_codes=sorted(codes))
            return next((code for code in _KNOWN_CODES if code in codes), 1)
    return 0


def _pass_on(signum: int, _: object) -> None:
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signum)


def _tied(launcher: int, member: Callable[[], None]) -> None:
    """Run a member that cannot outlive its launcher."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the first member has its own way to stop
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        sys.exit(1)
    member()
