"""Processes forked from the warm parent, which must equal those that the interpreter starts."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm.popen import RUN, Popen, is_same, read_command, run
from tests.warm.sources import ROOT, SOURCES

PATIENCE_S = 300
#: Program that reports its own properties, and whether it had to import torch.
ASKED = """
import json, os, sys
loaded = "torch" in sys.modules
print(json.dumps({
    "loaded": loaded, "pid": os.getpid(), "argv": sys.argv[1:], "folder": os.getcwd(), "heard": sys.stdin.read(),
    "variable": os.environ.get("COTRAIN_SAID"), "home": os.environ.get("HOME"), "main": __name__,
    "path": sys.path[0], "leads": os.getsid(0) == os.getpid(), "open": [n for n in range(900) if os.path.exists(f"/proc/self/fd/{n}")],
    "shares": os.environ.get("MKL_CBWR"),
}))
print("and to the other side", file=sys.stderr)
sys.exit(7)
"""
CRASH = "import atexit; atexit.register(print, 'at the end'); raise ValueError('of its own')"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_forked_process_has_the_properties_of_a_started_one(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with Popen(
        python(ASKED, "one", "two"), cwd=tmp_path, env={**os.environ, "COTRAIN_SAID": "so"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writer],
        start_new_session=True,
    ) as process:  # fmt: skip
        out, err = process.communicate("a word")
    os.close(reader)
    os.close(writer)
    told = json.loads(out)
    assert told == {
        "loaded": True, "pid": process.pid, "argv": ["one", "two"], "folder": str(tmp_path),
        "heard": "a word", "variable": "so", "home": os.environ.get("HOME"), "main": "__main__",
        "path": str(tmp_path), "leads": True, "open": [0, 1, 2, writer], "shares": "AUTO,STRICT",
    }  # fmt: skip
    assert err == "and to the other side\n"
    assert process.returncode == 7


def test_a_process_with_a_session_of_its_own_has_it_at_once() -> None:
    """Jupyter asks for the group of a kernel right after its start, and later signals it."""
    for _ in range(20):
        with Popen(python("input()"), stdin=subprocess.PIPE, start_new_session=True) as process:
            assert os.getpgid(process.pid) == process.pid
            process.communicate(b"\n")


def test_a_process_with_other_import_settings_is_started_normally() -> None:
    ran = run(python(ASKED), env={**os.environ, "HF_HOME": "/elsewhere"}, stdin=subprocess.DEVNULL)
    assert json.loads(ran.stdout)["loaded"] is False
    assert ran.returncode == 7


def test_variables_set_by_imports_do_not_prevent_a_fork() -> None:
    importlib.import_module("cotrain_workers.engine.engine")
    assert is_same({**os.environ, "COTRAIN_DATA_DIR": "/elsewhere"})


@pytest.mark.parametrize("path", [None, str(ROOT), os.pathsep.join(SOURCES)])
def test_the_children_of_a_forked_supervisor_are_forked(path: str | None) -> None:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import os; from tests.warm.popen import is_same; print(is_same(os.environ))"
    ran = run(python(code), env=given if path is None else {**given, "PYTHONPATH": path})
    assert (ran.stdout, ran.stderr) == ("True\n", "")


def test_a_program_of_another_sdk_is_forked_from_a_parent_with_that_sdk() -> None:
    older = ROOT / ".sdk" / "tinker-0.22.0"
    if not older.is_dir():
        pytest.fail("tinker 0.22.0 is missing: run tests/conformance/sdks.sh")
    code = "import sys; loaded = 'tinker' in sys.modules; import tinker; print(loaded, tinker.__file__)"
    ran = run(python(code), env={**os.environ, "PYTHONPATH": str(older)})
    assert ran.stdout == f"True {older / 'tinker' / '__init__.py'}\n", ran.stderr


def test_a_failing_process_prints_its_error_and_runs_its_exit_handlers() -> None:
    ran = run(python(CRASH))
    assert ran.returncode == 1
    assert ran.stdout == "at the end\n"
    assert ran.stderr.endswith("ValueError: of its own\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_has_the_status_of_its_signal(number: signal.Signals) -> None:
    with Popen(python("import time; time.sleep(600)")) as process:
        assert process.poll() is None
        process.send_signal(number)
    assert process.returncode == -number


def test_a_forked_process_ends_with_its_creator() -> None:
    process = Popen(python("import time; time.sleep(600)"))
    assert process._orderer
    died = os.pidfd_open(process.pid)
    process._orderer.close()  # as the kernel does for a killed process
    assert select.select([died], [], [], PATIENCE_S)[0]
    os.close(died)
    process.returncode = -signal.SIGKILL


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["-m", "package.module", "-x"], ("module", "package.module")),
        (["-P", "-W", "ignore", "-m", "package"], ("module", "package")),
        (["folder/script.py"], ("script", "folder/script.py")),
        (["-c", "pass"], ("code", "pass")),
        (["-u", "-c", "pass"], ("code", "pass")),
        (["-X", "importtime", "script.py"], None),
        (["-I", "-S", "script.py"], None),
        ([], None),
    ],
)
def test_a_supported_command_line_is_parsed_and_others_are_not(
    command: list[str], program: tuple[str, str] | None
) -> None:
    read = read_command([sys.executable, *command])
    assert (read and read.program) == program


def test_a_process_of_pytest_xdist_is_forked_with_the_tests_imported() -> None:
    is_forked = "tests.warm.collected" in Path("/proc/self/cmdline").read_text().split("\0")
    assert is_forked == ("PYTEST_XDIST_WORKER" in os.environ)


def test_an_import_error_of_a_test_module_is_reported_by_a_forked_process(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("def test_before() -> None: ...\nimport nothing_of_this_name\n")
    fresh = {k: v for k, v in os.environ.items() if k != RUN and not k.startswith("PYTEST_")}
    command = [
        sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.conftest", "-c", "pyproject.toml",
        "--rootdir", str(tmp_path), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=fresh, text=True, capture_output=True, check=False)
    assert "No module named 'nothing_of_this_name'" in done.stdout
    assert done.returncode != 0


def test_a_program_other_than_python_is_started_normally() -> None:
    assert read_command(["redis-server"]) is None
    assert run(["echo", "up"]).stdout == "up\n"
