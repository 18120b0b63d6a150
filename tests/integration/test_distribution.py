"""What `pip install` gives: a small client for researchers, and nothing missing for operators."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cotrain", "cotrain_store", "cotrain_scheduler", "cotrain_server", "cotrain_workers")
NOT_FOR_CLIENTS = ("torch", "redis", "fastapi", "uvicorn", "numpy", "transformers", "peft")
OLDEST_PYTHON = (3, 11)
CLIENT_BYTES = 40 * 1000**2


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path


class ClientInstall(NamedTuple):
    server_packages: list[str]
    size_bytes: int


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build both the way they are published: the wheel out of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Distributions(sdist, wheel)


def source_files() -> set[str]:
    """Every file of the five packages as git would ship it, relative to its source root."""
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
    assert {"client/cotrain/__init__.py", "workers/cotrain_workers/engine.py"} <= held


@pytest.mark.timeout(600)
def test_a_client_only_install_is_small_and_brings_no_server(
    distributions: Distributions, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = ["install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install, str(distributions.wheel)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    installed = inspect_client(python)
    print(f"client-only install: {installed.size_bytes / 1024**2:.1f} MB")
    assert installed.server_packages == []
    assert installed.size_bytes < CLIENT_BYTES


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_is_written_in_the_oldest_python_that_is_promised(package: str) -> None:
    (root,) = (ROOT / "pyproject.toml").parent.glob(f"*/{package}")
    for path in root.rglob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=OLDEST_PYTHON)


def inspect_client(python: Path) -> ClientInstall:
    """Ask a clean environment what it has, importing cotrain with every warning an error."""
    script = f"""
import importlib.util, json, pathlib, sysconfig
import cotrain
site = pathlib.Path(sysconfig.get_path("purelib"))
found = [name for name in {NOT_FOR_CLIENTS!r} if importlib.util.find_spec(name)]
size_bytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
print(json.dumps([found, size_bytes]))
"""
    done = subprocess.run(
        [python, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    return ClientInstall(*json.loads(done.stdout))
