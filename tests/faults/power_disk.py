"""A disk that loses power: synced data remains, and other data may be lost.

Processes that start with `Disk.environment` write below `Disk.root` through a preloaded shim,
`shims/power.c`. The shim keeps a journal of their syncs.

The method `cut` turns a folder into a possible state after a power cut. Without a `draw` this is
the worst state: unsynced bytes and names are lost, and replaced or removed files are back. With a
`draw`, each unsynced change may have survived.

A name is durable when its folder was synced. Redis 6.2 never syncs its folder. It relies on a
property of ext4, XFS and Btrfs: syncing a new file makes its name durable (`NAMES_FOLLOW`). Our own
writers do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "shims" / "power.c"
#: Folders in which syncing a file also makes its name durable.
NAMES_FOLLOW = ("redis",)
#: Folders of a server. They are never removed; tests keep their own files next to them.
KEPT = ("redis", "spool", "snapshots", "weights", "optimizers", "external")

_C = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _STATX_INO_AND_BTIME = -100, 0x100, 0x900


class Entry(NamedTuple):
    """File or folder that a name refers to."""

    identity: str
    kind: str  # "d" or "f"


@dataclass
class Synced:
    """Durable data, by identity: bytes of files, names in folders."""

    sizes: dict[str, int] = field(default_factory=dict)
    names: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def note(self, line: str) -> None:
        """Apply one line of the journal."""
        kind, identity, *rest = line.split("\t")
        if kind == "D":
            it = iter(rest[1:])
            self.names[identity] = {name: Entry(*entry) for name, *entry in zip(it, it, it, strict=True)}
            return
        size, path = int(rest[0]), Path(rest[1])
        self.sizes[identity] = size
        if path.parent.name in NAMES_FOLLOW:
            folder = self.names.setdefault(identity_of(path.parent), {})
            folder[path.name] = Entry(identity, "f")


def compile_shim(target: Path, source: Path = SOURCE) -> str | None:
    """Compile a shim to `target`.

    Return None, or the reason why it cannot be compiled on this machine.
    """
    compiler = shutil.which("cc")
    if not compiler:
        return "there is no C compiler (cc)"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(target), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"the shim cannot be compiled: {made.stderr}" if made.returncode else None


class Disk:
    """The disk below `root`, seen through the shim."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root = root.resolve()
        self._shim = self.root / ".shim"
        (self._shim / "inodes").mkdir(parents=True)
        (self._shim / "journal").touch()
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library), "POWER_SHIM": str(self._shim),
        }  # fmt: skip

    def be_slow(self, delay_ms: int) -> None:
        """Delay every sync by this many milliseconds from now on."""
        (self._shim / "delay_ms").write_text(str(delay_ms))

    def syncs(self) -> list[str]:
        """List the syncs so far, each `F<path>` or `D<path>`."""
        lines = [line.split("\t") for line in self._journal()]
        return [line[0] + line[3 if line[0] == "F" else 2] for line in lines]

    def cut(self, folder: Path, draw: random.Random | None = None) -> None:
        """Turn `folder` into a possible state after a power cut. No process may use it."""
        after = folder / ".after"
        self.leave(folder, after, draw)
        for part in after.iterdir():
            shutil.rmtree(folder / part.name)
            part.rename(folder / part.name)
            self._settle(folder / part.name)
        after.rmdir()

    def leave(self, folder: Path, target: Path, draw: random.Random | None = None, unsynced: str = "") -> None:
        """Write to `target` a possible state of `folder` after a power cut.

        Syncs that match the pattern `unsynced`, in the format of `syncs`, are ignored.
        """
        target.mkdir()
        synced = Synced()
        for line in self._journal():
            kind, *rest = line.split("\t")
            path = rest[2 if kind == "F" else 1]
            if Path(path).is_relative_to(folder) and not fnmatchcase(kind + path, unsynced):
                synced.note(line)
        left = _Left(synced, self._shim / "inodes", _live(folder), draw)
        for part in KEPT:
            if (folder / part).is_dir():
                left.write_folder(identity_of(folder / part), target / part)

    def _journal(self) -> list[str]:
        return (self._shim / "journal").read_text().splitlines()

    def _settle(self, folder: Path) -> None:
        """Mark everything in a folder as durable, because it survived a power cut."""
        names = []
        for path in folder.iterdir():
            identity = identity_of(path)
            if path.is_dir():
                self._settle(path)
            else:
                os.link(path, self._shim / "inodes" / identity)
                self._note("F", identity, str(path.stat().st_size), str(path))
            names += [path.name, identity, "d" if path.is_dir() else "f"]
        self._note("D", identity_of(folder), str(folder), *names)

    def _note(self, *words: str) -> None:
        with (self._shim / "journal").open("a") as journal:
            journal.write("\t".join(words) + "\n")


@dataclass(frozen=True)
class _Left:
    """One power cut: the durable data, the present data, and the surviving part of the rest."""

    synced: Synced
    inodes: Path
    live: Mapping[str, Path]
    draw: random.Random | None

    def write_folder(self, identity: str, target: Path) -> None:
        target.mkdir()
        durable, present = self.synced.names.get(identity, {}), self._present(identity)
        for name in sorted(durable.keys() | present.keys()):
            has_made_it = self.draw is not None and self.draw.random() < 0.5
            entry = present.get(name) if has_made_it else durable.get(name)
            if entry and entry.kind == "d":
                self.write_folder(entry.identity, target / name)
            elif entry:
                self._write_file(entry.identity, target / name)

    def _write_file(self, identity: str, target: Path) -> None:
        content = self.live.get(identity, self.inodes / identity).read_bytes()
        size = min(self.synced.sizes.get(identity, 0), len(content))
        if self.draw is not None:
            size = self.draw.randint(size, len(content))
        target.write_bytes(content[:size])

    def _present(self, identity: str) -> dict[str, Entry]:
        folder = self.live.get(identity)
        return {path.name: entry for path, entry in _entries(folder)} if folder else {}


def identity_of(path: Path) -> str:
    """Return the identity of a file or folder as the shim does: its inode and birth time."""
    it = ctypes.create_string_buffer(256)  # struct statx
    flags, mask = _AT_SYMLINK_NOFOLLOW, _STATX_INO_AND_BTIME
    if _C.statx(_AT_FDCWD, os.fsencode(path), flags, mask, it):
        raise OSError(ctypes.get_errno(), f"statx of {path}")
    inode = int.from_bytes(it.raw[32:40], "little")
    born_s, born_ns = (int.from_bytes(it.raw[at : at + n], "little") for at, n in ((80, 8), (88, 4)))
    return f"{inode}.{born_s}.{born_ns}"


def _live(folder: Path) -> dict[str, Path]:
    parts = [folder / part for part in KEPT if (folder / part).is_dir()]
    found = {identity_of(part): part for part in parts}
    for part in parts:
        found.update({entry.identity: path for path, entry in _below(part)})
    return found


def _below(folder: Path) -> Iterator[tuple[Path, Entry]]:
    for path, entry in _entries(folder):
        yield path, entry
        if entry.kind == "d":
            yield from _below(path)


def _entries(folder: Path) -> Iterator[tuple[Path, Entry]]:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                yield path, Entry(identity_of(path), "d" if stat.S_ISDIR(mode) else "f")
