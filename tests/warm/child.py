"""Be the process that was ordered, in a fork: what `python -m MODULE` is, but for what was imported before."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import runpy
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
#: Descriptors are put out of the way up here, before each gets the number it is to have.
ABOVE_ALL = 500
#: What imports set in the environment of a process that did not have it; before those of the parent.
_BEFORE_IMPORTS = frozenset(os.environ)


def become(order: dict[str, Any], descriptors: Sequence[int], parent_address: Any) -> NoReturn:
    """Be what an order says, to the end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["new_session"]:
        os.setsid()
    keep_only(dict(zip(order["descriptors"], descriptors, strict=True)))
    os.chdir(order["folder"])
    take_environment(order["environment"])
    read_environment_again()
    if "tests.warm.supervision" in sys.modules:  # that of our own programs, not that of an SDK
        sys.modules["tests.warm.supervision"].have_children_forked(parent_address)
    if order["ignores_warnings"]:
        warnings.simplefilter("ignore")
    run(order["program"], order["arguments"], sees_folder=order["sees_folder"])


def keep_only(given: dict[int, int]) -> None:
    """Give each descriptor the number it is to have, and close all others, as `exec` would."""
    moved = {
        number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE_ALL)
        for number, descriptor in given.items()
    }
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    for open_one in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if open_one not in given:
            with suppress(OSError):  # that of the folder itself is gone by now
                os.close(open_one)


def take_environment(given: dict[str, str]) -> None:
    """Have the environment of the order, and what imports set in every environment."""
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - _BEFORE_IMPORTS}
    os.environ.clear()
    os.environ.update({**set_by_imports, **given})


def read_environment_again() -> None:
    """Do what importing does with the environment, where that matters."""
    imported: Mapping[str, Any] = sys.modules
    if failpoints := imported.get("cotrain_store.failpoints"):
        failpoints._FAULTS = failpoints.Faults.asked_for(os.environ)
    if hub := imported.get("huggingface_hub.constants"):
        hub.HF_HUB_OFFLINE = (
            os.environ.get("HF_HUB_OFFLINE", "").upper() in hub.ENV_VARS_TRUE_VALUES
        )
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED has it


def run(program: Sequence[str], arguments: Sequence[str], *, sees_folder: bool) -> NoReturn:
    """Run a module, a script or code as the interpreter would, and end as it would."""
    kind, name = program
    sys.argv = ["-c" if kind == "code" else name, *arguments]
    folder = Path(name).resolve().parent if kind == "script" else Path.cwd()
    added = [
        found
        for found in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if found not in sys.path
    ]
    sys.path[:1] = [str(folder)] * sees_folder + [found for found in added if found]
    status: object = 0
    try:
        match kind:
            case "module":
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            case "script":
                runpy.run_path(name, run_name="__main__")
            case "code":
                main = sys.modules["__main__"] = types.ModuleType("__main__")
                exec(compile(name, "<string>", "exec"), main.__dict__)  # a test's own
    except SystemExit as left:
        status = left.code
    except BaseException as error:  # noqa: BLE001  # what the interpreter would do
        sys.excepthook(type(error), error, error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(status)


def end(status: object) -> NoReturn:
    """Wait for threads, call what wants to be called at the end, and go."""
    threading._shutdown()  # type: ignore[attr-defined]
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status or 0)
