"""files: what a link leads to. No API key is asked for: the link is made for one file, for minutes."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cotrain_server.errors import BadLink
from cotrain_server.http.dependencies import ServicesDep
from cotrain_server.http.downloads import (
    ARCHIVE,
    SlotDownload,
    TarDownload,
    file_download,
    files_of,
    names_of,
    open_files,
)
from cotrain_server.requests.checkpoint_lookup import find_source
from cotrain_store.errors import CheckpointNotFound

if TYPE_CHECKING:
    from cotrain_server.requests.checkpoint_lookup import Source
    from cotrain_server.services import Services

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])


@router.get(
    "/files/{token}/{file}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}, "application/x-tar": {}}}},
)
async def download(token: str, file: str, request: Request, services: ServicesDep) -> Response:
    """Send one file of a checkpoint, to any client that has the link; no API key is asked for.

    What the link was made for is looked up again: a checkpoint that was deleted, or taken from its
    reader, is gone, and a name that moved does not give other weights. A tenant's downloads wait for one
    another once DOWNLOADS_PER_TENANT are under way.
    """
    link = services.signer.read_link(token, time.time())
    if link.file != file:
        raise BadLink
    async with AsyncExitStack() as slot:
        await slot.enter_async_context(services.downloads.of(link.tenant))
        source = await find_source(services, link.tenant, link.path)
        if source.weights.ref != link.weights:
            raise CheckpointNotFound
        answer = await _answer(services, source, file, link.path, request)
        return SlotDownload(answer, slot.pop_all())


async def _answer(
    services: Services, source: Source, file: str, path: str, request: Request
) -> Response:
    checkpoint = source.checkpoint
    files_there = files_of(services.settings.blob_store, checkpoint, source.weights)
    if file != ARCHIVE:
        return file_download(
            (await open_files(files_there, [file], path))[0], request.headers.get("range")
        )
    files = await open_files(files_there, names_of(checkpoint, source.weights), path)
    name = f"{checkpoint.run}_{checkpoint.kind}_{checkpoint.name}.tar".replace(":", "_")
    return TarDownload(files, name, checkpoint.created_at)
