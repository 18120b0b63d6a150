"""tokenizers: the tokenizer of a base model, for clients that no hub can give it to."""

from __future__ import annotations

import asyncio
import gzip
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response

from cotrain.wire.runs import TOKENIZER_FILES, TokenizerResponse
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.text_apis.tokenizer_cache import tokenizer_folder

if TYPE_CHECKING:
    from pathlib import Path

router = APIRouter(
    prefix="/api/v1", tags=["sampling"], route_class=TenantRoute, dependencies=[api_key]
)


@router.get("/tokenizers", responses={200: {"model": TokenizerResponse}})
async def get_tokenizer(
    request: Request, services: ServicesDep, base_model: Annotated[str, Query(max_length=4_096)]
) -> Response:
    """Send the files of a base model's tokenizer, as its workers use it."""
    pool = await services.records.pool_of(base_model)
    folder = await tokenizer_folder(pool, services.settings)
    content = await asyncio.to_thread(_compressed, folder)
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        content = await asyncio.to_thread(gzip.decompress, content)
    return Response(content, headers=headers, media_type="application/json")


@lru_cache(maxsize=8)  # a folder is named after its content; one of a large vocabulary takes 8 MB
def _compressed(folder: Path) -> bytes:
    paths = [folder / name for name in TOKENIZER_FILES]
    files = {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()}
    return gzip.compress(TokenizerResponse(files=files).model_dump_json().encode(), mtime=0)
