"""Operations on the checkpoints of an account: upload, list, copy, download and interpolate."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotrain.clients.rest_calls import archive_url, checkpoint_url
from cotrain.clients.run_factory import Made, Runs
from cotrain.errors import MalformedMessage
from cotrain.requests.connection import BackgroundLoop
from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_json
from cotrain.transport.download import archive_of
from cotrain.transport.http import Transport
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    SaveWeightsResponse,
    UploadQuery,
    UploadResponse,
)
from cotrain.wire.rest import Checkpoint, CheckpointsListResponse
from cotrain.wire.runs import InterpolateRequest, InterpolateResponse, UntypedAPIFuture

# Arguments: bytes transferred and the total, 0 if unknown.
Progress = Callable[[int, int], None]

PAGE = 100
#: File names that a server may write: the folder may contain other files of the caller.
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(?:json|safetensors|age)")


@dataclass(frozen=True)
class Adapter:
    """Adapter trained elsewhere, with the settings of its upload."""

    source: Path
    """A PEFT folder, or an archive of one."""
    base_model: str
    name: str
    ttl_seconds: int | None
    user_metadata: Mapping[str, str] | None


class Checkpoints:
    """Calls on whole checkpoints, outside the order of any run."""

    def __init__(self, transport: Transport, runs: Runs) -> None:
        self._transport = transport
        self._runs = runs

    async def upload(self, adapter: Adapter, progress: Progress | None = None) -> str:
        """Upload an adapter; returns the checkpoint's path once it is stored.

        Raises OSError, APIError, or RequestFailed if the adapter does not fit its base model.
        """
        archive = archive_of(adapter.source)
        session_id, seq_id = await self._runs.reserve()
        metadata = adapter.user_metadata
        query = UploadQuery(
            base_model=adapter.base_model,
            name=adapter.name,
            session_id=session_id,
            model_seq_id=seq_id,
            ttl_seconds=adapter.ttl_seconds,
            user_metadata=json.dumps(dict(metadata)) if metadata else None,
        )
        answer = await self._transport.post_stream(
            "training_runs/upload", query, archive.size, lambda: archive.chunks(progress), reader(UploadResponse)
        )
        await wait_for_json(self._transport, answer.import_request_id, Made)
        await wait_for_json(self._transport, answer.request_id, SaveWeightsResponse)
        return answer.path

    async def list_all(self) -> list[Checkpoint]:
        """Return every checkpoint of the account, newest first. Raises APIError."""
        checkpoints: list[Checkpoint] = []
        while True:
            query = f"checkpoints?limit={PAGE}&offset={len(checkpoints)}"
            page = await self._transport.get(query, reader(CheckpointsListResponse))
            checkpoints += page.checkpoints
            if not page.checkpoints or not page.cursor:
                return checkpoints
            if len(checkpoints) >= page.cursor.total_count:
                return checkpoints

    async def copy(self, path: str, ttl_seconds: int | None, token: str | None) -> str:
        """Copy a checkpoint to a new run of this session; returns the new path. Raises APIError."""
        session_id, seq_id = await self._runs.reserve()
        wanted = CopyWeightsRequest(
            source_path=path,
            session_id=session_id,
            model_seq_id=seq_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=token,
        )
        copy = await self._transport.post("copy_weights", wanted, reader(CopyWeightsResponse))
        return copy.tinker_path

    async def download(self, path: str, folder: Path, progress: Progress | None = None) -> list[str]:
        """Download a checkpoint's files to a folder, each one atomically; returns their names.

        Raises OSError or APIError.
        """
        where = f"{checkpoint_url(path)}/external_weights_urls"
        urls = (await self._transport.get(where, reader(ExternalWeightsUrlsResponse))).urls
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        names = sorted(urls)  # the small configuration first, because links expire soon
        for name in names:
            if not FILE.fullmatch(name):
                raise MalformedMessage(f"{name!r} is no name of a checkpoint's file")
        sizes = [await self._transport.size_of(urls[name]) for name in names] if progress else []
        for i, name in enumerate(names):
            of_file = progress and _of_all(progress, sizes, i)
            await self._transport.fetch(urls[name], folder / name, of_file)
        return names

    async def download_archive(self, path: str, file: Path, progress: Progress | None = None) -> None:
        """Download all files of a checkpoint as one tar. Raises OSError or APIError."""
        link = await archive_url(self._transport, checkpoint_url(path))
        await asyncio.to_thread(file.parent.mkdir, parents=True, exist_ok=True)
        await self._transport.fetch(link.url, file, progress)


def interpolate(loop: BackgroundLoop, transport: Transport, wanted: InterpolateRequest) -> Future[InterpolateResponse]:
    """Send an interpolation at once; the future is accepted when the server has queued it."""

    async def submit() -> str:
        path = "mint/checkpoints/interpolate"
        return (await transport.post(path, wanted, reader(UntypedAPIFuture))).request_id

    accepted = loop.start(submit())

    async def finish() -> InterpolateResponse:
        request_id = await asyncio.shield(asyncio.wrap_future(accepted))
        return await wait_for_json(transport, request_id, InterpolateResponse)

    return Future(accepted, loop.start(finish()), what="an interpolation of checkpoints")


def _of_all(progress: Progress, sizes: Sequence[int], i: int) -> Progress:
    """Report the bytes of file `i` as a part of all files; the total is 0 if any size is unknown."""
    total = sum(sizes) if all(sizes) else 0
    return lambda done, _: progress(sum(sizes[:i]) + done, total)
