"""The pages' own files: read once, served under a name that changes with what is in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Response

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "static"
MOUNTED_AT = "/ui/static"
_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_A_YEAR_S = 365 * 24 * 3600

_FILES = {
    str(path.relative_to(FOLDER)): path.read_bytes()
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in _TYPES
}
_HASHES = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in _FILES.items()}


def static_url(name: str) -> str:
    """Name a file in a page. Raises KeyError for one that is not there."""
    return f"{MOUNTED_AT}/{name}?v={_HASHES[name]}"


@router.get(MOUNTED_AT + "/{name:path}", response_model=None)
async def static_file(name: str, v: str = "") -> Response:
    """Give one of the files; a browser keeps what was asked for with its hash."""
    content = _FILES.get(name)
    if content is None:
        raise HTTPException(404)
    headers: dict[str, Any] = {"X-Content-Type-Options": "nosniff"}
    if v == _HASHES[name]:
        headers["Cache-Control"] = f"public, max-age={_A_YEAR_S}, immutable"
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=headers)
