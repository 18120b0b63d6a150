"""Durability of our writers: confirmed data survives a power cut, and each of their syncs is
necessary."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.faults.power_disk import Disk, compile_shim
from tests.faults.power_writers import digests
from tests.warm.sources import ROOT, SOURCES

#: Syncs of each writer, in the format of `Disk.syncs`, and the purpose of each.
SYNCS = {
    "the bytes of bodies": "F*/spool/*",
    "the names of segments": "D*/spool",
    "the bytes of recovery copies": "F*/snapshots/*",
    "the names of recovery copies": "D*/snapshots/*",
    "the folders of runs": "D*/snapshots",
    "the tensors of adapters": "F*/weights/*model.safetensors*",
    "the configurations of adapters": "F*/weights/*config.json*",
    "the names in an adapter's folder": "D*/weights/??/*",
    "the names of adapters": "D*/weights/??",
    "the folders of adapters": "D*/weights",
    "the bytes of optimizer states": "F*/optimizers/*",
    "the names of optimizer states": "D*/optimizers/??",
    "the folders of optimizer states": "D*/optimizers",
    "the bytes of exports": "F*/external/*.age.*",
    "who owns exports": "F*/external/*owner.json*",
    "the names in exports": "D*/external/*",
    "the names of exports": "D*/external",
}
#: A predecessor crashed after it had renamed its files, and before their names were synced.
JUST_RENAMED = ("snapshot", "weights", "optimizer", "external")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "power.so"
    if reason := compile_shim(path):
        pytest.skip(reason)
    return path


@pytest.fixture
def disk(library: Path, tmp_path: Path) -> Disk:
    return Disk(tmp_path, library)


def run(disk: Disk, program: str, *arguments: object) -> str:
    """Run a program on the disk. Return its output."""
    paths = os.pathsep.join([*SOURCES, str(ROOT)])
    ran = subprocess.run(
        [sys.executable, *program.split(), *map(str, arguments)], check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, **disk.environment, "PYTHONPATH": paths},
    )  # fmt: skip
    return ran.stdout


def python(disk: Disk, folder: Path, program: str) -> None:
    """Run lines of Python in `folder`."""
    (folder / "redis").mkdir(parents=True, exist_ok=True)
    (folder / "spool").mkdir(exist_ok=True)
    script = folder / "program.py"
    synced = "def sync(name): os.fsync(os.open(name, os.O_RDONLY))\n"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{synced}{program}")
    run(disk, str(script))


def test_unsynced_data_is_lost_in_a_power_cut(disk: Disk) -> None:
    folder = disk.root / "d"
    python(disk, folder, """
for name in ("named", "unnamed"):
    file = open(f"spool/{name}", "ab", buffering=0)
    file.write(b"synced")
    os.fsync(file)
    file.write(b" and not")
    if name == "named": sync("spool")
""")  # fmt: skip
    disk.cut(folder)
    assert [path.name for path in (folder / "spool").iterdir()] == ["named"]
    assert (folder / "spool" / "named").read_bytes() == b"synced"


def test_replaced_or_removed_files_are_back_until_synced(disk: Disk) -> None:
    folder = disk.root / "d"
    python(disk, folder, """
for name in ("replaced", "removed"):
    open(f"spool/{name}", "w").write("old")
    sync(f"spool/{name}")
sync("spool")
open("spool/new", "w").write("new")
sync("spool/new")
os.rename("spool/new", "spool/replaced")
os.unlink("spool/removed")
""")  # fmt: skip
    disk.cut(folder)
    assert {path.name: path.read_text() for path in (folder / "spool").iterdir()} == {
        "replaced": "old", "removed": "old",
    }  # fmt: skip


def test_data_that_survived_one_power_cut_survives_the_next(disk: Disk) -> None:
    folder = disk.root / "d"
    python(disk, folder, """
os.mkdir("spool/deep")
open("spool/deep/file", "w").write("old")
for name in ("spool/deep/file", "spool/deep", "spool"): sync(name)
""")  # fmt: skip
    for _ in range(3):
        disk.cut(folder)
    assert (folder / "spool" / "deep" / "file").read_text() == "old"


def test_any_part_of_the_unsynced_data_may_survive(disk: Disk) -> None:
    folder = disk.root / "d"
    python(disk, folder, """
file = open("spool/file", "ab", buffering=0)
sync("spool")
file.write(b"0123456789")
open("spool/other", "w")
""")  # fmt: skip
    left = set()
    for seed in range(40):
        target = disk.root / f"left{seed}"
        disk.leave(folder, target, random.Random(seed))
        left |= {path.name for path in (target / "spool").iterdir()}
        left.add(str((target / "spool" / "file").stat().st_size))
    assert left >= {"other", "0", "5", "10"}


class Written(NamedTuple):
    """A disk after all writers have run."""

    disk: Disk
    folder: Path
    promised: dict[str, str]
    """Durable files of the folder."""
    found: Path
    """Folder of writers that had to repeat each write."""
    promised_found: dict[str, str]


@pytest.fixture(scope="module")
def written(library: Path) -> Iterator[Written]:
    """Run all writers, and run them again in another folder where each crashes once."""
    faults = ",".join(f"{name}.renamed=error" for name in JUST_RENAMED)
    with TemporaryDirectory(prefix="cotrain-") as name:
        disk = Disk(Path(name), library)
        folder, found = disk.root / "d", disk.root / "found"
        folder.mkdir()
        found.mkdir()
        promised = json.loads(run(disk, "-m tests.faults.power_writers", folder, found, faults))
        yield Written(disk, folder, promised[0], found, promised[1])


def test_data_that_our_writers_confirm_survives_a_power_cut(written: Written, tmp_path: Path) -> None:
    disk, folder, promised, *_ = written
    disk.leave(folder, tmp_path / "left")
    assert digests(tmp_path / "left") == promised
    assert len(promised) == 12


@pytest.mark.parametrize("what", SYNCS)
def test_a_power_cut_reveals_a_missing_sync(what: str, written: Written, tmp_path: Path) -> None:
    disk, folder, promised, *_ = written
    disk.leave(folder, tmp_path / "left", unsynced=SYNCS[what])
    assert digests(tmp_path / "left") != promised


def test_a_file_renamed_by_a_crashed_writer_is_synced_when_it_is_found(written: Written, tmp_path: Path) -> None:
    written.disk.leave(written.found, tmp_path / "left")
    assert digests(tmp_path / "left") == written.promised_found
    assert len(written.promised_found) == len(written.promised)
