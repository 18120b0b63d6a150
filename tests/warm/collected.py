"""Parent process of those of `pytest -n`: it imports the tests once for all of them.

`python -m tests.warm.collected LISTENER RUN FOLDER ARGUMENT …` collects what pytest would collect
in this folder with these arguments, and serves orders like `tests.warm.parent`. A forked process
collects the tests itself from imported modules: 2 s of CPU instead of 10. It also meets and reports
every failed import itself.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from typing_extensions import override

from tests.warm.parent import Parent, build_routes, compile_names_of_weights, ready_to_fork
from tests.warm.popen import RUN, Popen, reached


def fork_processes_of(config: pytest.Config) -> None:
    """Fork the processes of this run of pytest-xdist."""
    asked = config.invocation_params

    class Forked(gateway_io.Popen2IOMaster):
        """Replacement for execnet's start of a process."""

        def __init__(self, args: Sequence[str], execmodel: Any) -> None:
            environment = {**os.environ, RUN: str(os.getpid())}
            pipe = subprocess.PIPE
            self.popen = OfTests(args, stdin=pipe, stdout=pipe, env=environment)
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    class OfTests(Popen):
        """Process forked from the parent of tests."""

        @override
        def _connected(self, environment: Mapping[str, str]) -> socket.socket:
            program = ["tests.warm.collected", str(asked.dir), *map(str, asked.args)]
            # Ctrl-C must end it, as always: no session of its own.
            return reached("tests", program, environment, new_session=False)

    gateway_io.Popen2IOMaster = Forked  # type: ignore[misc]  # it has no setting for this


class Failures:
    """Plugin that removes modules of failed imports: pytest keeps half of them, and children would
    find these."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.failed:
            for name, module in list(sys.modules.items()):
                if is_of(getattr(module, "__file__", None), str(collector.path)):
                    del sys.modules[name]
        return report


def is_of(file: str | None, collected: str) -> bool:
    """Return True if a module is the collected file or folder, or was imported for that folder."""
    return file is not None and collected in (file, str(Path(file).parent))


def preload(folder: str, arguments: Sequence[str]) -> None:
    """Import the tests."""
    os.chdir(folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads of tests that train a tokenizer
    options = ["--collect-only", "-qqq", "--capture=no", "-n", "0"]
    pytest.main([*arguments, *options], plugins=[Failures()])
    del os.environ["TOKENIZERS_PARALLELISM"]
    if "cotrain_server.app" in sys.modules:
        build_routes()
    if "cotrain_workers.engine.engine" in sys.modules:
        compile_names_of_weights()
    gc.unfreeze()  # the collected items
    ready_to_fork()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the forked processes
    preload(sys.argv[3], sys.argv[4:])
    Parent(socket.socket(fileno=int(sys.argv[1]))).serve(int(sys.argv[2]))
