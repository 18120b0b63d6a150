"""Assembly of the HTTP application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from cotrain.version import __version__
from cotrain_server.adapter_upload.pending_files import expiring
from cotrain_server.http import responses
from cotrain_server.http.middleware import DirectRoutes, HeadAsGet, RequestMiddleware
from cotrain_server.http.path_prefix import PathPrefix, path_prefix
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.routes import (
    account,
    admin_tenants,
    admin_workers,
    anthropic,
    checkpoints,
    futures,
    mint,
    openai,
    runs,
    samplers,
    sessions,
    status,
    traces,
    training,
    uploads,
    weights,
)
from cotrain_server.services import LONG_POLL_S, open_services
from cotrain_server.settings import ServerSettings
from cotrain_server.ui import router as pages
from cotrain_server.views.fleet_metrics import metrics_pages
from cotrain_server.webhooks.delivery import delivering
from cotrain_server.webhooks.sender import Sender
from cotrain_store.metrics_port import metrics_port
from cotrain_store.monitoring import metrics

#: Most frequent routers first, because a request is compared with one route after the other.
ROUTERS = (
    futures.router,
    training.router,
    samplers.sampling_router,
    status.router,
    account.keys_router,
    sessions.router,
    runs.router,
    weights.router,
    mint.router,
    checkpoints.router,
    checkpoints.files_router,
    uploads.router,
    uploads.external_router,
    uploads.files_router,
    runs.lists_router,
    checkpoints.lists_router,
    sessions.lists_router,
    traces.router,
    traces.download_router,
    account.usage_router,
    account.webhook_router,
    samplers.router,
    status.tokenizers_router,
    openai.router,
    anthropic.router,
    admin_tenants.router,
    admin_tenants.keys_router,
    admin_workers.runs_router,
    admin_workers.router,
    admin_workers.fleet_router,
    admin_tenants.audit_router,
    pages.router,
)

#: Error formats of other APIs, by the start of their paths.
FORMATS: dict[str, responses.ErrorFormat] = {
    "/oai/": openai.OpenAIRoute.error_outside,
    "/anthropic/": anthropic.AnthropicRoute.error_outside,
}
#: Routes that queue a request, and that a training loop calls in each step.
FREQUENT = tuple(
    route
    for route in (*training.router.routes, *samplers.sampling_router.routes)
    if isinstance(route, TenantRoute)
    and route.endpoint in (training.forward_backward, training.forward, training.optim_step, samplers.asample)
)
#: Built on the first use, once for all applications of a process.
ROUTES = APIRouter(responses=responses.ERROR_RESPONSES)
for router in ROUTERS:
    ROUTES.include_router(router)


def create_app(settings: ServerSettings, long_poll_s: float = LONG_POLL_S) -> FastAPI:
    """Return the application. Its lifespan opens the store."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings, long_poll_s) as services:
            app.state.services = services
            sender = Sender(settings.webhook_networks)
            port = metrics_port(settings, metrics_pages(services))
            async with delivering(services.webhooks, sender), expiring(settings.blob_store):
                with port:
                    yield

    app = FastAPI(
        title="cotrain",
        version=__version__,
        description="Trains and samples many people's LoRA adapters at once on one base model.",
        lifespan=lifespan,
        routes=ROUTES.routes,
        # A path with an extra slash is a different path, and is not redirected.
        redirect_slashes=False,
        # FastAPI's pages for the OpenAPI load their scripts from another host. /openapi.json stays.
        docs_url=None,
        redoc_url=None,
        # FastAPI's spans and logs contain paths, queries and exception messages, which may quote a tenant.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    metrics.BUILD_INFO.labels(__version__).set(1)
    # The middleware added last receives a request first.
    app.add_middleware(DirectRoutes, routes=(*futures.POLLS, *FREQUENT))
    app.add_middleware(HeadAsGet)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(RequestMiddleware, access_log=settings.access_log)
    if prefix := path_prefix(settings.public_url):
        app.add_middleware(PathPrefix, prefix=prefix)
    responses.install(app, FORMATS)
    return app
