"""Code of a forked child: it behaves like `python -m MODULE`, except that imports are already done."""

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
#: Descriptors are first moved above this number, before each gets its final number.
ABOVE_ALL = 500
#: Variables before the imports of the parent, to find those that imports set.
_BEFORE_IMPORTS = frozenset(os.environ)


def become(order: dict[str, Any], descriptors: Sequence[int], parent_address: Any) -> NoReturn:
    """Run the program of an order to its end."""
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
    # only for our own programs, not for those of an SDK
    if "tests.warm.supervision" in sys.modules:
        sys.modules["tests.warm.supervision"].have_children_forked(parent_address)
    if order["ignores_warnings"]:
        warnings.simplefilter("ignore")
    run(order["program"], order["arguments"], sees_folder=order["sees_folder"])


def keep_only(given: dict[int, int]) -> None:
    """Move each descriptor to its ordered number, and close all others, as `exec` would."""
    moved = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE_ALL) for number, descriptor in given.items()}
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    for open_one in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if open_one not in given:
            with suppress(OSError):  # the descriptor of the folder itself is closed by now
                os.close(open_one)


def take_environment(given: dict[str, str]) -> None:
    """Set the environment of the order, plus the variables that imports set in every environment."""
    set_by_imports = {name: os.environ[name] for name in os.environ.keys() - _BEFORE_IMPORTS}
    os.environ.clear()
    os.environ.update({**set_by_imports, **given})


def read_environment_again() -> None:
    """Repeat the effects of the environment on imported modules, where they matter."""
    imported: Mapping[str, Any] = sys.modules
    if failpoints := imported.get("cotrain_store.failpoints"):
        failpoints._FAULTS = failpoints.Faults.configured(os.environ)
    if hub := imported.get("huggingface_hub.constants"):
        hub.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in hub.ENV_VARS_TRUE_VALUES
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED has it


def run(program: Sequence[str], arguments: Sequence[str], *, sees_folder: bool) -> NoReturn:
    """Run a module, a script or code as the interpreter would, and exit as it would."""
    kind, name = program
    sys.argv = ["-c" if kind == "code" else name, *arguments]
    folder = Path(name).resolve().parent if kind == "script" else Path.cwd()
    added = [found for found in os.environ.get("PYTHONPATH", "").split(os.pathsep) if found not in sys.path]
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
                exec(compile(name, "<string>", "exec"), main.__dict__)  # a test's own code
    except SystemExit as left:
        status = left.code
    except BaseException as error:  # noqa: BLE001  # as in the interpreter
        sys.excepthook(type(error), error, error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(status)


def end(status: object) -> NoReturn:
    """Wait for threads, call the exit functions, and exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status or 0)
