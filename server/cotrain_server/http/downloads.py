"""Downloads of a checkpoint's files: single files with ranges, or all of them as one tar.

Only regular files that a worker wrote for this checkpoint are opened. Their names are fixed here,
and links are never followed. If a worker deletes an open file, the download still completes.
"""

import asyncio
import errno
import hashlib
import io
import re
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import structlog
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from cotrain_store.blobs.protocol import Blob, Blobs, BlobsUnavailable
from cotrain_store.disk.checksums import REMEDY, SUMS, fault_of, read_sums
from cotrain_store.errors import CheckpointNotFound, Reason, Refused, StoreUnavailable
from cotrain_store.messages.runs import CheckpointRecord, WeightsRecord, external_folder

log = structlog.get_logger()

#: Files that PEFT reads, and the only content of a download.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ARCHIVE = "checkpoint.tar"
#: Empty file that SDK 0.22 expects in an archive.
COMPLETE = "checkpoint_complete"
#: Read size of a file. Each chunk is copied in the event loop, and held until the client has received it.
CHUNK_BYTES = 256 * 1024
_BLOCK = tarfile.BLOCKSIZE
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
#: Errors of this process or of this moment. The file may still exist.
_TRANSIENT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.ESTALE})

#: Files whose digest was verified: identity with modification time, and digest.
_VERIFIED: set[tuple[str, str]] = set()
_MAX_VERIFIED = 10_000


@dataclass(frozen=True)
class OpenFile:
    """An open file of a download. The response closes it."""

    name: str
    content: BinaryIO
    blob: Blob


def _is_encrypted(checkpoint: CheckpointRecord, weights: WeightsRecord) -> bool:
    """Return True if the downloadable files of a checkpoint are encrypted."""
    return checkpoint.kind == "external_weights" and weights.external


def file_names(checkpoint: CheckpointRecord, weights: WeightsRecord) -> tuple[str, ...]:
    """Return the names of the files of a checkpoint."""
    encrypted = _is_encrypted(checkpoint, weights)
    return tuple(f"{name}.age" for name in ADAPTER_FILES) if encrypted else ADAPTER_FILES


def folder_of(blobs: Blobs, checkpoint: CheckpointRecord, weights: WeightsRecord) -> Blobs:
    """Return the folder of a checkpoint's files."""
    if _is_encrypted(checkpoint, weights):
        return blobs.below(f"external/{external_folder(weights.ref)}")
    return blobs.below(f"weights/{weights.digest[:2]}/{weights.digest}")


async def open_files(blobs: Blobs, names: Sequence[str], path: str) -> list[OpenFile]:
    """Open files of the checkpoint of this path for reading, and verify their digests.

    The blob store verifies the bytes of objects.

    Raises:
        CheckpointNotFound: a file does not exist any more.
        CHECKPOINT_DAMAGED: a file is damaged, or its digest is not in SUMS.
        StoreUnavailable: a file cannot be read now.
    """
    return await asyncio.to_thread(_open_files, blobs, names, path)


def _open_files(blobs: Blobs, names: Sequence[str], path: str) -> list[OpenFile]:
    with ExitStack() as opened:
        files = [OpenFile(name, *_open(blobs, name, opened)) for name in names]
        try:
            fault = _fault(blobs, files)
        except OSError as error:
            raise _unreadable(names[0], error) from error
        if fault:
            log.error("file_damaged", checkpoint=path, files=files[0].blob.key, reason=fault)
            raise Refused(Reason.CHECKPOINT_DAMAGED, f"Checkpoint {path}: {fault}. {REMEDY}")
        opened.pop_all()  # the response closes all of them
        return files


def _open(blobs: Blobs, name: str, opened: ExitStack) -> tuple[BinaryIO, Blob]:
    try:
        content, blob = blobs.open(name)
    except OSError as error:
        if isinstance(error, BlobsUnavailable) or error.errno in _TRANSIENT_ERRORS:
            raise _unreadable(name, error) from error
        raise CheckpointNotFound from error
    return opened.enter_context(content), blob


def _unreadable(name: str, error: OSError) -> StoreUnavailable:
    log.error("file_unreadable", file=name, reason=error.strerror)
    return StoreUnavailable("The file cannot be read now.")


def _fault(blobs: Blobs, files: Sequence[OpenFile]) -> str | None:
    """Return the reason why files may not be sent, or None."""
    try:
        sums = read_sums(blobs.get(SUMS))
    except FileNotFoundError:
        sums = None
    fault = fault_of(sums, [file.name for file in files])
    if fault or not sums or not blobs.folder:
        return fault
    return next((f"{file.name} is damaged" for file in files if not _is_intact(file, sums[file.name])), None)


def _is_intact(file: OpenFile, expected: str) -> bool:
    """Return True if a file has the expected digest. Each file is hashed once."""
    verified = (file.blob.mark, expected)
    if verified in _VERIFIED:
        return True
    found = hashlib.file_digest(cast("io.BufferedReader", file.content), "sha256").hexdigest()
    if found != expected:
        return False
    if len(_VERIFIED) >= _MAX_VERIFIED:
        _VERIFIED.clear()
    _VERIFIED.add(verified)
    return True


class Download(StreamingResponse):
    """Content of open files, which are closed once it is sent. It holds the slot of its tenant until then."""

    def __init__(
        self, files: Sequence[OpenFile], content: AsyncIterator[bytes], headers: Mapping[str, str], **how: Any
    ):
        self.slot = AsyncExitStack()
        self._files = files
        super().__init__(content, headers=headers, **how)

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, close the files, and release the slot."""
        async with self.slot:
            for file in self._files:
                self.slot.enter_context(file.content)
            await super().__call__(scope, receive, send)


def file_download(file: OpenFile, headers: Mapping[str, str]) -> Download:
    """Return a response with a file, or with one range of it that the headers of a request name."""
    size, tag = file.blob.size, f'"{hashlib.sha256(file.blob.mark.encode()).hexdigest()}"'
    requested = _RANGE.fullmatch(headers.get("range", ""))  # another form is answered with the whole file
    start = int(requested[1]) if requested else 0
    end = min(size, int(requested[2]) + 1) if requested and requested[2] else size
    is_part = requested is not None and start < end and headers.get("if-range", tag) == tag
    if not is_part:
        start, end = 0, size
    described = {
        "Content-Length": str(end - start),
        "Content-Disposition": f'attachment; filename="{file.name}"',
        "Accept-Ranges": "bytes",
        "ETag": tag,
    }
    if is_part:
        described["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status = 206 if is_part else 200
    content = _content(file, start, end)
    return Download([file], content, described, status_code=status, media_type="application/octet-stream")


def tar_download(files: Sequence[OpenFile], name: str, made_at: float) -> Download:
    """Return a response with files as one tar, created while it is sent. Its length is computed in advance."""
    headers = {
        "Content-Length": str(tar_size([file.blob.size for file in files])),
        "Content-Disposition": f'attachment; filename="{name}"',
        "Accept-Ranges": "none",
    }
    return Download(files, _tar(files, int(made_at)), headers, media_type="application/x-tar")


def tar_size(sizes: Sequence[int]) -> int:
    """Return the size in bytes of a tar of files of these sizes and the empty COMPLETE.

    Each file has a header and whole blocks, and two empty blocks end the archive.
    """
    return sum(_BLOCK + size + _padding(size) for size in [*sizes, 0]) + 2 * _BLOCK


async def _tar(files: Sequence[OpenFile], made_at: int) -> AsyncIterator[bytes]:
    for file in files:
        yield _header(file.name, file.blob.size, made_at)
        async for part in _content(file, 0, file.blob.size):
            yield part
        yield bytes(_padding(file.blob.size))
    yield _header(COMPLETE, 0, made_at) + bytes(2 * _BLOCK)


async def _content(file: OpenFile, start: int, end: int) -> AsyncIterator[bytes]:
    file.content.seek(start)
    while part := await asyncio.to_thread(file.content.read, min(CHUNK_BYTES, end - start)):
        start += len(part)
        yield part


def _header(name: str, size: int, made_at: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, made_at
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % _BLOCK
