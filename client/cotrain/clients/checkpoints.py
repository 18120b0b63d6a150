"""Calls for the checkpoints of an account: list, delete, download and interpolate."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from cotrain.errors import MalformedMessage, NotFoundError
from cotrain.requests.background_loop import BackgroundLoop
from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_result
from cotrain.transport.http import Transport, url_of
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import (
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)
from cotrain.wire.rest import Checkpoint, CheckpointsListResponse
from cotrain.wire.runs import InterpolateRequest, InterpolateResponse, UntypedAPIFuture

log = logging.getLogger("cotrain")

Progress = Callable[[int, int], None]
"""Receives the bytes transferred and the total, 0 if unknown."""

PAGE = 100
#: File names that a server may write: the folder may contain other files of the caller.
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(?:json|safetensors|age)")
#: A link that expired longer ago than this is rejected, so that a login page is never saved as an archive.
#: The clocks of client and server may differ by less.
CLOCKS_DIFFER = timedelta(days=1)


async def list_all(transport: Transport) -> list[Checkpoint]:
    """Return every checkpoint of the account, newest first. Raises APIError."""
    checkpoints: list[Checkpoint] = []
    while True:
        query = f"checkpoints?limit={PAGE}&offset={len(checkpoints)}"
        page = await transport.get(query, reader(CheckpointsListResponse))
        checkpoints += page.checkpoints
        if not page.checkpoints or not page.cursor or len(checkpoints) >= page.cursor.total_count:
            return checkpoints


async def delete_all(transport: Transport, paths: Sequence[str]) -> list[str]:
    """Delete checkpoints, one after the other; return the paths of those that existed. Raises APIError."""
    urls = {path: checkpoint_url(path) for path in paths}  # a malformed path deletes nothing
    deleted = []
    for path, url in urls.items():
        try:
            await transport.delete(url)
        except NotFoundError:
            continue  # another process deleted it, or it has expired
        deleted.append(path)
    return deleted


async def download(transport: Transport, path: str, folder: Path, progress: Progress | None) -> list[str]:
    """Download a checkpoint's files to a folder, each one atomically; returns their names.

    Raises OSError or APIError.
    """
    where = f"{checkpoint_url(path)}/external_weights_urls"
    urls = (await transport.get(where, reader(ExternalWeightsUrlsResponse))).urls
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    names = sorted(urls)  # the small configuration first, because links expire soon
    for name in names:
        if not FILE.fullmatch(name):
            raise MalformedMessage(f"{name!r} is no name of a checkpoint's file")
    sizes = [await transport.size_of(urls[name]) for name in names] if progress else []
    for i, name in enumerate(names):
        of_file = progress and _part_of_all(progress, sizes, i)
        await transport.fetch(urls[name], folder / name, of_file)
    return names


async def download_archive(transport: Transport, path: str, file: Path, progress: Progress | None) -> None:
    """Download all files of a checkpoint as one tar. Raises OSError or APIError."""
    link = await archive_url(transport, checkpoint_url(path))
    await asyncio.to_thread(file.parent.mkdir, parents=True, exist_ok=True)
    await transport.fetch(link.url, file, progress)


def interpolate(loop: BackgroundLoop, transport: Transport, request: InterpolateRequest) -> Future[InterpolateResponse]:
    """Send an interpolation at once; the future is accepted when the server has queued it."""

    async def submit() -> str:
        path = "mint/checkpoints/interpolate"
        return (await transport.post(path, request, reader(UntypedAPIFuture))).request_id

    accepted = loop.start(submit())

    async def finish() -> InterpolateResponse:
        request_id = await asyncio.shield(asyncio.wrap_future(accepted))
        return await wait_for_result(transport, request_id, InterpolateResponse)

    return Future(accepted, loop.start(finish()), what="an interpolation of checkpoints")


def checkpoint_url(tinker_path: str) -> str:
    """Return the URL path of a checkpoint. Raises ValueError if `tinker_path` is malformed."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return url_of("training_runs", parsed.training_run_id, "checkpoints", *parsed.checkpoint_id.split("/"))


async def archive_url(transport: Transport, checkpoint: str) -> CheckpointArchiveUrlResponse:
    """Return the URL of the tar of a checkpoint; the server sends it as a redirect."""
    return await transport.get(f"{checkpoint}/archive", _archive_link)


def _part_of_all(progress: Progress, sizes: Sequence[int], i: int) -> Progress:
    """Report the bytes of file `i` as a part of all files; the total is 0 if any size is unknown."""
    total = sum(sizes) if all(sizes) else 0
    return lambda done, _: progress(sum(sizes[:i]) + done, total)


def _archive_link(response: httpx.Response) -> CheckpointArchiveUrlResponse:
    """Parse a redirect to an archive. Raises MalformedMessage for a redirect to a login page."""
    try:
        expires = parsedate_to_datetime(response.headers["Expires"])
        link = CheckpointArchiveUrlResponse(url=response.headers["Location"], expires=expires)
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"{response.url} did not answer where the archive is") from error
    if expires < datetime.now(UTC) - CLOCKS_DIFFER:
        raise MalformedMessage(f"{response.url} did not answer where the archive is")
    return link
