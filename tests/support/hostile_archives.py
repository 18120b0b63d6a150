"""Malicious archives, and every way to pack a valid one."""

from __future__ import annotations

import tarfile
from collections.abc import Callable

from tests.support.uploads import CONFIG, TENSORS, adapter, tar, tar_of

GOOD = adapter()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    good = [(tarfile.TarInfo(each), content) for each, content in GOOD.items()]
    return tar_of([(info, b"x" * size), *good])


#: A way to pack files -> how.
PACKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {"tar": tar, "tar.gz": lambda files: tar(files, "w:gz")}


HOSTILE = {
    "parent": member("../adapter_config.json"),
    "parent inside": member("a/../../x/README.md"),
    "absolute": member("/etc/adapter_config.json"),
    "symbolic link": member("README.md", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": member("README.md", tarfile.LNKTYPE, "/etc/passwd"),
    "device": member("README.md", tarfile.CHRTYPE),
    "fifo": member("README.md", tarfile.FIFOTYPE),
    "sparse": member("README.md", tarfile.GNUTYPE_SPARSE),
    "folder of the parent": member("..", tarfile.DIRTYPE),
    "back slash": member("..\\README.md", size=3),
}


BOMBS = {
    "gzip": tar({**GOOD, TENSORS: bytes(2**24)}, "w:gz"),
    "gzip in a skipped file": tar({"README.md": bytes(2**24), **GOOD}, "w:gz"),
    "plain": tar({TENSORS: bytes(2**17)}),
    "configuration": tar({CONFIG: bytes(2**21)}, "w:gz"),
}
