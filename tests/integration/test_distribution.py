"""Result of `pip install`: a small client for researchers, and a complete server for operators."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

ROOT = Path(__file__).parents[2]
PACKAGES = ("cotrain", "cotrain_store", "cotrain_scheduler", "cotrain_server", "cotrain_workers")
NOT_FOR_CLIENTS = ("torch", "redis", "fastapi", "uvicorn", "numpy", "transformers", "peft")
CLIENT_BYTES = 50 * 1000**2
KEY = "tml-example_key-of-mine"
EXAMPLES = re.findall(r"\((\w+\.py)\) \|", (ROOT / "examples" / "README.md").read_text())
EXAMPLES.remove("demo.py")  # it starts a server
#: Examples that need torch for a custom loss.
DIFFERENTIATED_HERE = ("dpo.py", "custom_loss.py")
#: Program that prints the exit status and the output of each example with `--help`.
STARTS = """
import contextlib, io, json, runpy, sys
folder, *examples = sys.argv[1:]
sys.path.insert(0, folder)
found = {}
for example in examples:
    sys.argv = [example, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(f"{folder}/{example}", run_name="__main__")
        except SystemExit as ended:
            found[example] = ended.code, printed.getvalue()
print(json.dumps(found))
"""


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


class ClientInstall(NamedTuple):
    server_packages: list[str]
    size_bytes: int


class Laptop(NamedTuple):
    python: Path
    server: str

    def run(self, example: str, *options: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run an example against the server; `packages` is a folder of additional packages."""
        program = str(ROOT / "examples" / example)
        return self._run(program, *options, packages=packages)

    def run_code(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in the clean environment."""
        return self._run("-c", code, *arguments)

    def _run(self, *arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "COTRAIN_BASE_URL": self.server,
            "COTRAIN_API_KEY": KEY,
            **({"PYTHONPATH": str(packages)} if packages else {}),
        }
        command = [str(self.python), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build both as they are published: the wheel from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Distributions(sdist, wheel)


def source_files() -> set[str]:
    """Return every file of the five packages that git would ship, relative to its source root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    inside = [Path(line).parts[1:] for line in listed if (ROOT / line).exists()]
    return {"/".join(parts) for parts in inside if parts and parts[0] in PACKAGES}


def test_the_wheel_holds_every_file_of_the_five_packages(distributions: Distributions) -> None:
    held = set(zipfile.ZipFile(distributions.wheel).namelist())
    assert source_files() <= held
    assert "cotrain/py.typed" in held
    assert any(name.startswith("cotrain_store/scripts/") and name.endswith(".lua") for name in held)


def test_the_wheel_puts_nothing_else_at_top_level(distributions: Distributions) -> None:
    names = zipfile.ZipFile(distributions.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_sdist_holds_the_sources_and_the_licence(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "constraints.txt"} <= held
    assert {"client/cotrain/__init__.py", "workers/cotrain_workers/engine/engine.py"} <= held


@pytest.fixture(scope="module")
def client_python(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install only the client into a clean environment, as on a laptop.

    Its requirements are those of the wheel. They are linked, because pip takes long to fetch and
    to unpack them.
    """
    folder = tmp_path_factory.mktemp("laptop") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    alone = ["--no-compile", "--no-deps", "--no-index", str(distributions.wheel)]
    subprocess.run([*pip, *alone], check=True, capture_output=True, text=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("cotrain-*.dist-info")
    link_installed(required(PathDistribution(metadata)), site)
    return python


@pytest.mark.timeout(900)
def test_a_client_only_install_is_small_and_has_no_server(client_python: Path) -> None:
    installed = inspect_client(client_python)
    print(f"client-only install: {installed.size_bytes / 1024**2:.1f} MB")
    assert installed.server_packages == []
    assert installed.size_bytes < CLIENT_BYTES


@pytest.fixture(scope="module")
def laptop(client_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """The clean environment, and a server as if on another host."""
    model = build_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")
    beat = ("--clock-mode=metronome", "--clock-period-s=0.5")
    with Serving(tmp_path_factory.mktemp("data"), [str(model)], [KEY], beat) as serving:
        yield Laptop(client_python, serving.address)


@pytest.mark.timeout(900)
def test_an_example_starts_with_the_client_or_names_a_missing_package(laptop: Laptop) -> None:
    """Start all of them in one process: its modules are those of the clean environment."""
    done = laptop.run_code(STARTS, str(ROOT / "examples"), *EXAMPLES)
    assert done.returncode == 0, done.stderr
    for example, (status, printed) in json.loads(done.stdout).items():
        if status:
            assert example in DIFFERENTIATED_HERE
            assert status == f"{example} needs torch on this machine: pip install torch"
        else:
            assert printed.startswith(f"usage: {example}")


@pytest.mark.timeout(900)
def test_an_example_without_text_runs_with_the_client_alone(laptop: Laptop) -> None:
    done = laptop.run("clock_cycles.py", "--json", "--steps=2", "--prepare-s=0")
    assert [row["loop"] for row in json.loads(done.stdout)] == ["naive", "submit both", "pipelined"]
    assert done.stderr.startswith("Running each loop …\n")
    assert done.stderr.endswith("No picture is drawn: pip install matplotlib\n")


@pytest.mark.timeout(900)
def test_examples_with_text_need_a_tokenizer_and_report_it(laptop: Laptop, tmp_path: Path) -> None:
    without = laptop.run("sft.py", "--json", "--steps=2")
    assert without.returncode == 1
    assert without.stderr == "get_tokenizer needs: pip install transformers\n"
    link_installed(["transformers"], tmp_path)
    assert not (tmp_path / "torch").exists()
    done = laptop.run("sft.py", "--json", "--steps=2", packages=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "step 2 of 2, 0 s left" in done.stderr
    assert "it/s" not in done.stderr  # only the example's own progress bar


def required(installed: Distribution) -> list[str]:
    """List the packages that one requires here without extras."""
    requirements = map(Requirement, installed.requires or ())
    return [
        requirement.name
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def link_installed(wanted: list[str], folder: Path) -> None:
    """Link installed packages and their requirements into a folder, as pip would install them
    there."""
    needed, found = [*wanted], set()
    while needed:
        name = needed.pop()
        if name in found:
            continue
        found.add(name)
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if ".." not in file.parts}:
            (folder / top).unlink(missing_ok=True)  # two packages may contain one: __pycache__
            (folder / top).symlink_to(str(installed.locate_file(top)))
        needed += required(installed)


def inspect_client(python: Path) -> ClientInstall:
    """Return the content of a clean environment, after importing cotrain with every warning an
    error."""
    script = f"""
import importlib.util, json, pathlib, sysconfig
import cotrain
site = pathlib.Path(sysconfig.get_path("purelib"))
found = [name for name in {NOT_FOR_CLIENTS!r} if importlib.util.find_spec(name)]
tops = [top for top in site.iterdir() if top.name != "__pycache__"]
files = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
size_bytes = sum(
    path.stat().st_size for path in files if path.is_file() and "__pycache__" not in path.parts
)
print(json.dumps([found, size_bytes]))
"""
    done = subprocess.run([python, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    return ClientInstall(*json.loads(done.stdout))
