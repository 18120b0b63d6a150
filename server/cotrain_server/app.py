"""Put the HTTP application together."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from cotrain.version import __version__
from cotrain_server import errors
from cotrain_server.http.long_poll import LongPolls
from cotrain_server.http.middleware import RequestMiddleware
from cotrain_server.routes import (
    anthropic,
    audit,
    auth,
    billing,
    checkpoints,
    files,
    futures,
    links,
    loads,
    mint,
    openai,
    runs,
    samplers,
    sampling,
    search,
    session_lists,
    sessions,
    status,
    tokenizers,
    traces,
    training,
    training_runs,
    uploads,
    weights,
)
from cotrain_server.services import LONG_POLL_S, open_services
from cotrain_store.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cotrain_server.settings import ServerSettings


#: What is asked for most stands first: a request is compared with one route after the other.
PARTS = (
    futures,
    training,
    sampling,
    auth,
    sessions,
    runs,
    weights,
    loads,
    mint,
    checkpoints,
    links,
    files,
    uploads,
    training_runs,
    session_lists,
    search,
    traces,
    billing,
    audit,
    samplers,
    tokenizers,
    openai,
    anthropic,
    status,
)


def create_app(settings: ServerSettings, long_poll_s: float = LONG_POLL_S) -> FastAPI:
    """Make the application; its lifespan opens the store."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings, long_poll_s) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="cotrain",
        version=__version__,
        description="Trains and samples many people's LoRA adapters at once on one base model.",
        lifespan=lifespan,
        responses=errors.ERROR_RESPONSES,
        # A path with a slash too many is another path, not a hint at the one without.
        redirect_slashes=False,
    )
    metrics.BUILD_INFO.labels(__version__).set(1)
    # The last one added is the first to see a request.
    app.add_middleware(LongPolls, polls=futures.POLLS)
    app.add_middleware(RequestMiddleware)
    errors.install(app)
    for part in PARTS:
        app.include_router(part.router)
    return app
