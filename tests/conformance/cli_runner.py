"""Runner of commands of the official CLI, each in a forked process that already has its imports.

Reads a JSON list of commands (`argv`, `input`, `env`) and prints a JSON list of their results. A
command that retries for minutes is killed: its exit status is then negative.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryFile
from typing import Any

from tests.warm.parent import ready_to_fork

#: A rejected command ends within seconds. SDKs retry for up to 300 s.
PATIENCE_S = 300


def main() -> None:
    """Run all commands in turn."""
    commands = json.load(sys.stdin)
    for module in iter_modules(import_module("tinker.cli.commands").__path__):
        import_module(f"tinker.cli.commands.{module.name}")
    import_module("tinker")
    import_module("tinker.lib.public_interfaces.admin_client")
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]  # it reads the environment of the command when it is imported
    # Each command makes several contexts from the same certificates and uses none: the server
    # speaks plain HTTP.
    ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]  # its type
    ready_to_fork()
    print(json.dumps([_run(command) for command in commands]))


def _run(command: dict[str, Any]) -> dict[str, Any]:
    with ExitStack() as files:
        streams = [files.enter_context(TemporaryFile("w+")) for _ in range(3)]
        streams[0].write(command["input"])
        streams[0].seek(0)
        child = os.fork()
        if child == 0:
            _become(command, [stream.fileno() for stream in streams])
        _, status = os.waitpid(child, 0)
        for stream in streams[1:]:
            stream.seek(0)
        return {"status": os.waitstatus_to_exitcode(status), "out": streams[1].read(), "err": streams[2].read()}


def _become(command: dict[str, Any], streams: list[int]) -> None:
    """Replace this process by the command: without a terminal, as from a script, until it exits."""
    os.setsid()
    signal.alarm(PATIENCE_S)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  # for as long as it lives
    os.environ.update(command["env"])
    os.chdir(Path(os.environ["HOME"]))
    sys.argv = ["tinker", *command["argv"]]
    from tinker.cli.__main__ import cli

    sys.exit(cli())


if __name__ == "__main__":
    main()
