"""Resumable downloads of files, and streaming uploads of adapters.

A partial download is stored in the target's folder. Its name contains the server's name for exactly these
bytes (`ETag`). So another process can resume it too, and bytes of different files are never mixed.
"""

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import httpx

from cotrain.errors import APIConnectionError, ForeignAnswer, UnsupportedInput
from cotrain.transport.responses import is_page, refusal

TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
_STRONG_TAG = re.compile(r'"([\w.-]{1,100})"')
PART = 206
NOTHING_LEFT = 416


async def size_of(http: httpx.AsyncClient, url: str) -> int:
    """Return the bytes behind a link; 0 if the server sends no size, or does not respond.

    It requests the first byte, because a link signed for GET rejects other methods.
    """
    request = _request(http, url, {"Range": "bytes=0-0"})
    try:
        async with aclosing(await http.send(request, stream=True)) as answer:
            if answer.status_code == PART:
                whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
            else:
                whole = answer.headers.get("Content-Length", "") if answer.is_success else ""
    except httpx.TransportError:  # the download itself reports it better
        return 0
    return int(whole) if whole.isdecimal() else 0


class Download:
    """Download of a URL to a file, which is complete or missing."""

    def __init__(self, http: httpx.AsyncClient, url: str, target: Path, on_bytes: Callable[[int, int], None]) -> None:
        """Prepare a download; `on_bytes` is called with the bytes that have arrived and the total."""
        self._http = http
        self._url = url
        self._target = target
        self._start = f".{target.name}~"  # of the names of partial files, which end with a tag and `.part`
        self._on_bytes = on_bytes

    async def resume(self) -> None:
        """Download the remaining bytes. Raises OSError, or APIError, which may be transient."""
        part = await asyncio.to_thread(self._find_part)
        headers = {}
        if part is not None:
            headers = {"Range": f"bytes={part.stat().st_size}-", "If-Range": f'"{self._tag_of(part)}"'}
        request = _request(self._http, self._url, headers)
        try:
            async with aclosing(await self._http.send(request, stream=True)) as answer:
                if answer.status_code == NOTHING_LEFT and part is not None:
                    # The file has changed: the next attempt downloads all of it.
                    await asyncio.to_thread(part.unlink)
                    raise APIConnectionError(f"{self._target.name} is another file by now")
                if answer.is_error:
                    await answer.aread()
                    raise refusal(answer, is_known=True)
                if not answer.is_success or is_page(answer):
                    raise ForeignAnswer(
                        f"{self._target.name} did not come: something before the server answered"
                        f" {answer.status_code} in its place"
                    )
                part = await self._save(answer, part)
        except httpx.TransportError as error:
            raise APIConnectionError(f"{self._target.name} broke off: {error}") from error
        await asyncio.to_thread(part.replace, self._target)

    async def _save(self, answer: httpx.Response, part: Path | None) -> Path:
        if part is None or answer.status_code != PART:
            tag = _STRONG_TAG.fullmatch(answer.headers.get("ETag", ""))
            part = self._target.with_name(f"{self._start}{tag[1] if tag else ''}.part")
            await asyncio.to_thread(self._replace_parts, part)
        had = part.stat().st_size
        total = had + int(answer.headers.get("Content-Length", 0))
        with await asyncio.to_thread(part.open, "ab") as file:
            async for chunk in answer.aiter_bytes():
                await asyncio.to_thread(file.write, chunk)
                had += len(chunk)
                self._on_bytes(had, total)
        size = part.stat().st_size
        if "Content-Length" in answer.headers and size != total:
            await asyncio.to_thread(part.unlink)  # another process has also written to it
            raise APIConnectionError(f"{self._target.name} has {size} bytes instead of {total}")
        return part

    def _find_part(self) -> Path | None:
        """Return the partial download that can be resumed, or None."""
        tagged = [part for part in self._parts() if self._tag_of(part)]
        return tagged[0] if len(tagged) == 1 and tagged[0].stat().st_size else None

    def _replace_parts(self, new: Path) -> None:
        for part in self._parts():
            part.unlink(missing_ok=True)
        new.touch()

    def _parts(self) -> list[Path]:
        return list(self._target.parent.glob(f"{escape(self._start)}*.part"))

    def _tag_of(self, part: Path) -> str:
        """Return the tag in the name of a partial file; without a tag it cannot be resumed."""
        return part.name.removeprefix(self._start).removesuffix(".part")


def _request(http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> httpx.Request:
    # Uncompressed, so that a byte range of the response is one of the file.
    headers = {**headers, "Accept-Encoding": "identity"}
    request = http.build_request("GET", url, headers=headers, timeout=TIMEOUT)
    del request.headers["X-API-Key"]
    return request


TENSORS = "adapter_model.safetensors"
ADAPTER_FILES = ("adapter_config.json", TENSORS)
#: Pickles, and weights in several files.
OTHER_WEIGHTS = (
    "adapter_model*.bin", "pytorch_model*.bin", "adapter_model*.pt", "adapter_model*.pth", "*.pkl",
    "*.pickle", "*.ckpt", "adapter_model-*.safetensors", "adapter_model.safetensors.index.json",
)  # fmt: skip
CHUNK_BYTES = 1024**2


@dataclass(frozen=True)
class UploadArchive:
    """Content of an upload, in order: bytes, and files."""

    parts: tuple[bytes | Path, ...]
    size: int

    async def chunks(self, progress: Callable[[int, int], None] | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes from the start; `progress` is called with the bytes sent and the total."""
        sent = 0
        for part in self.parts:
            async for chunk in _content(part):
                yield chunk
                sent += len(chunk)
                if progress:
                    progress(sent, self.size)


def archive_of(source: Path) -> UploadArchive:
    """Return an archive unchanged, or the two files of a PEFT folder as a tar.

    Raises OSError, or UnsupportedInput for weights in another form.
    """
    if not source.is_dir():
        return UploadArchive((source,), source.stat().st_size)
    _refuse_other_weights(source)
    parts: list[bytes | Path] = []
    for name in ADAPTER_FILES:
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} has no {name}: give the folder of a PEFT adapter")
        info = tarfile.TarInfo(name)
        info.size = (source / name).stat().st_size
        parts += [info.tobuf(tarfile.GNU_FORMAT), source / name, bytes(-info.size % tarfile.BLOCKSIZE)]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    return UploadArchive(tuple(parts), sum(map(_size, parts)))


def _refuse_other_weights(folder: Path) -> None:
    if (folder / TENSORS).exists():
        return
    names = sorted(path.name for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    if names:
        raise UnsupportedInput(
            f"Only safetensors checkpoints are accepted. {folder} holds {names[0]}: save the adapter as one {TENSORS}."
        )


def _size(part: bytes | Path) -> int:
    return part.stat().st_size if isinstance(part, Path) else len(part)


async def _content(part: bytes | Path) -> AsyncIterator[bytes]:
    if isinstance(part, bytes):
        yield part
        return
    with await asyncio.to_thread(part.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
