"""The two files of an adapter, unpacked from an uploaded archive: a tar, plain or gzip.

Nothing in it is trusted, its other files are skipped, and nothing is written to disk. Allowed members are read into memory, up to a limit that counts decompressed bytes as they arrive, whatever the archive
declares. Names only select members and never become paths.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Protocol

import structlog

from cotrain_server.adapter_upload.peft_config import CONFIG, named
from cotrain_server.adapter_upload.peft_tensors import TENSORS
from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable

log = structlog.get_logger()

#: An adapter's weights in another form than the one file that is read.
_OTHER_WEIGHTS = re.compile(
    r"(adapter_model|pytorch_model)\b.*\.(bin|pt|pth)(\.index\.json)?|adapter_model(-.*)?\.safetensors(\.index\.json)?"
    r"|.*\.(pkl|pickle|ckpt)"
)

#: A trainer writes a few dozen files with an adapter, sharded optimizers a few hundred.
MAX_MEMBERS = 1000
MAX_CONFIG_BYTES = 1024**2
#: Size limit of a tar header extension, such as a long name, and the maximum number in a row.
MAX_EXTENSION_BYTES = 64 * 1024
MAX_EXTENSIONS = 3
#: Maximum members of a gzip. Tools that write several members put 64 KiB into each.
MAX_GZIP_MEMBERS = 10_000

_BLOCK = 512
_CHUNK_BYTES = 64 * 1024
_EXTENSIONS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_WITH_CONTENT = (*_FILES, *_EXTENSIONS)
#: Exceptions of Python's readers for malformed bytes.
_BROKEN = (tarfile.TarError, zlib.error, EOFError, ValueError)


@dataclass(frozen=True)
class AdapterFiles:
    """Content of the two files of an adapter."""

    config: bytes
    tensors: bytes


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class _Member:
    name: str
    is_folder: bool
    is_file: bool
    content: _Reader


def unpack(archive: IO[bytes], limit_bytes: int) -> AdapterFiles:
    """Return the two files of an archive of at most `limit_bytes` once decompressed.

    Raises:
        Invalid: a member is forbidden, or one is missing.
        BodyTooLarge: more than `limit_bytes`.
        Unreadable: an unknown format, truncated or damaged.
    """
    found: dict[str, bytes] = {}
    others: list[str] = []
    try:
        for count, member in enumerate(_members(archive, limit_bytes), 1):
            if count > MAX_MEMBERS:
                raise Invalid(f"The archive has more than {MAX_MEMBERS} members.")
            _take(member, found, others, limit_bytes)
    except _BROKEN as broken:
        raise Unreadable(
            "The archive is truncated, damaged or not a tar. Unpack a zip and upload the folder."
        ) from broken
    if TENSORS not in found and any(map(_OTHER_WEIGHTS.fullmatch, others)):
        raise Invalid(f"Only safetensors checkpoints are accepted. Save the adapter as one {TENSORS}.")
    for name in (CONFIG, TENSORS):
        if name not in found:
            raise Invalid(f"The archive has no {name}.")
    return AdapterFiles(found[CONFIG], found[TENSORS])


def _take(member: _Member, found: dict[str, bytes], others: list[str], limit_bytes: int) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise _forbidden(member)
    if member.is_folder:
        return
    if not member.is_file:
        raise _forbidden(member)
    if path.name not in {CONFIG, TENSORS}:
        others.append(path.name)
        return
    if path.name in found:
        raise Invalid(f"The archive has {path.name} twice.")
    limit = MAX_CONFIG_BYTES if path.name == CONFIG else limit_bytes
    found[path.name] = _read_all(member.content, limit)


def _forbidden(member: _Member) -> Invalid:
    return Invalid(f"Archive contains a forbidden member: {named(member.name)}.")


def _read_all(content: _Reader, limit_bytes: int) -> bytes:
    received = bytearray()
    while chunk := content.read(_CHUNK_BYTES):
        received += chunk
        if len(received) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(received)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"Decompressed upload exceeds {limit_bytes / 1024**2:g} MiB.")


def _members(archive: IO[bytes], limit_bytes: int) -> Iterator[_Member]:
    is_gzip = archive.read(2) == b"\x1f\x8b"
    archive.seek(0)
    return _tar_members(_Counted(_Gunzip(archive) if is_gzip else archive, limit_bytes))


class _Gunzip:
    """Decompressed content of a gzip, member by member.

    `gzip.GzipFile` reads the name in a header byte by byte at any length, and any number of empty
    members. That can take minutes, during which this process does little else.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = _gunzip()
        self._members_left = MAX_GZIP_MEMBERS
        self._compressed = b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._member.eof and not self._begin_next():
                return b""
            compressed = self._compressed or self._file.read(_CHUNK_BYTES)
            chunk = self._member.decompress(compressed, size)
            self._compressed = self._member.unused_data or self._member.unconsumed_tail
            if chunk:
                return chunk
            if not compressed and not self._member.eof:
                raise EOFError

    def _begin_next(self) -> bool:
        self._compressed = self._compressed or self._file.read(_CHUNK_BYTES)
        if not self._compressed:
            return False
        self._members_left -= 1
        if not self._members_left:
            raise Invalid(f"The gzip has more than {MAX_GZIP_MEMBERS} members.")
        self._member = _gunzip()
        return True


def _gunzip() -> zlib._Decompress:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # 16: with the header and trailer of gzip


class _Counted:
    """A stream with a limit on its bytes, and an error at an early end."""

    def __init__(self, stream: _Reader, limit_bytes: int) -> None:
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._left = limit_bytes

    def read(self, size: int, /) -> bytes:
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise _too_large(self._limit_bytes)
        return chunk

    def read_exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            chunk = self.read(min(size - len(received), _CHUNK_BYTES))
            if not chunk:
                raise EOFError
            received += chunk
        return bytes(received)


class _Part:
    """The next `size` bytes of a stream; none if a header declares a negative size."""

    def __init__(self, stream: _Counted, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int, /) -> bytes:
        chunk = self._stream.read_exactly(min(size, self._left))
        self._left -= len(chunk)
        return chunk


def _tar_members(stream: _Counted) -> Iterator[_Member]:
    """Yield members, reading headers one by one. Header extensions are skipped, because no accepted name needs one."""
    extensions = 0
    while any(block := stream.read_exactly(_BLOCK)):
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        extensions = extensions + 1 if header.type in _EXTENSIONS else 0
        if extensions > MAX_EXTENSIONS or (extensions and header.size > MAX_EXTENSION_BYTES):
            raise Invalid("Archive contains a forbidden member: a header that never ends.")
        content = _Part(stream, header.size if header.type in _WITH_CONTENT else 0)
        if not extensions:
            yield _Member(header.name, header.isdir(), header.type in _FILES, content)
        while content.read(_CHUNK_BYTES):
            pass
        stream.read_exactly(-header.size % _BLOCK)
