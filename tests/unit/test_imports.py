"""Import cost of each package: the API must start without torch, the client without a server.

import-linter checks the same statically, but misses lazy imports and imports inside dependencies.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {
    "cotrain": ROOT / "client",
    "cotrain_store": ROOT / "scheduler",
    "cotrain_scheduler": ROOT / "scheduler",
    "cotrain_server": ROOT / "server",
}
TENSORS = {"torch", "transformers", "peft", "safetensors"}
SERVICES = {"redis", "fastapi", "starlette", "uvicorn", "numpy", "structlog", "prometheus_client"}

FORBIDDEN = {
    "cotrain": TENSORS | SERVICES,
    "cotrain_store": TENSORS | {"fastapi", "starlette", "uvicorn"},
    "cotrain_scheduler": TENSORS | {"fastapi", "starlette", "uvicorn"},
    "cotrain_server": TENSORS,
}

#: Imports each package after those that it may import, then the modules of all commands of `cotrain`. Prints all
#: libraries after each.
IMPORT_ALL = """
import importlib, json, sys
from importlib.metadata import entry_points
for names in json.loads(sys.argv[1]):
    for name in names:
        importlib.import_module(name)
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
from cotrain.cli import COMMANDS, command_line
command_line(entry_points(group=COMMANDS))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_of(package: str) -> list[str]:
    folder = ROOTS[package] / package
    parts = [path.relative_to(ROOTS[package]).with_suffix("").parts for path in folder.rglob("*.py")]
    return sorted({".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts})


def test_packages_and_commands_import_no_library_that_is_foreign_to_them() -> None:
    paths = json.dumps([str(root) for root in dict.fromkeys(ROOTS.values())])
    script = f"import sys; sys.path[:0] = {paths}\n{IMPORT_ALL}"
    modules = json.dumps([modules_of(package) for package in FORBIDDEN])
    done = subprocess.run([sys.executable, "-c", script, modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *libraries, of_commands = map(json.loads, done.stdout.splitlines())
    for package, loaded in zip(FORBIDDEN, libraries, strict=True):
        assert not FORBIDDEN[package] & set(loaded), package
    assert "cotrain_workers" in of_commands, "the commands of the workers were not loaded"
    assert not TENSORS & set(of_commands)


CLIENT = {"cotrain.clients", "cotrain.commands", "cotrain.transport", "httpx", "typer"}
#: Modules that a process must not import at its start, by its program.
NOT_AT_START = {
    "cotrain": {*CLIENT, "cotrain.wire", "google", "pydantic", "rich"},
    "cotrain_scheduler.__main__": {*CLIENT, "PIL", "cotrain.wire", "google", "numpy"},
    "cotrain_server.__main__": {*CLIENT, "PIL", "llguidance"},
    # The second module is that of its calls for passes.
    "cotrain_server.parser_child, cotrain_server.requests.pass_ops": {
        *CLIENT, "PIL", "asyncio", "cotrain.wire.model", "fastapi", "prometheus_client", "pydantic", "redis",
        "rich", "structlog",
    },
}  # fmt: skip


@pytest.mark.parametrize("program", NOT_AT_START)
def test_a_process_starts_without_modules_that_it_rarely_needs(program: str) -> None:
    script = f"import json, sys, {program}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not NOT_AT_START[program] & set(json.loads(done.stdout))
