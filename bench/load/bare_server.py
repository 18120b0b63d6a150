"""Floor of the API's costs: a FastAPI application that stores a body with one fsynced write, and reads it back.

    python -m bench.load.bare_server DESCRIPTOR

It checks no key, no body and no quota, and has no queue.
"""

from __future__ import annotations

import itertools
import os
import sys

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel


class Poll(BaseModel):
    """Request for a stored body."""

    request_id: str


def bare_app(redis_url: str) -> FastAPI:
    """Return the application."""
    store, numbers, app = redis.asyncio.from_url(redis_url), itertools.count(), FastAPI()

    @app.post("/api/v1/forward_backward")
    async def accept(request: Request) -> dict[str, str]:
        request_id = f"pass:{next(numbers)}"
        await store.set(request_id, await request.body(), ex=60)
        return {"request_id": request_id}

    @app.post("/api/v1/retrieve_future")
    async def retrieve(poll: Poll) -> Response:
        return Response(await store.get(poll.request_id), media_type="application/x-protobuf")

    return app


if __name__ == "__main__":
    uvicorn.run(bare_app(os.environ["COTRAIN_REDIS_URL"]), fd=int(sys.argv[1]), access_log=False, log_level="warning")
