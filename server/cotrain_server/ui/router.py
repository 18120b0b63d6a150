"""Routes under `/ui`, and the redirect from `/`."""

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from cotrain_server.ui import admin_forms, rendering
from cotrain_server.ui.access import login
from cotrain_server.ui.navigation import PAGES, ROUTERS
from cotrain_server.ui.page import router_of

router = APIRouter(include_in_schema=False)


@router.get("/")
async def home() -> RedirectResponse:
    """Redirect from the server's root to its pages."""
    return RedirectResponse("/ui", 303)


router.include_router(rendering.router)
router.include_router(login.router)
for more in ROUTERS:
    router.include_router(more)
router.include_router(admin_forms.router)
router.include_router(router_of(PAGES))
