"""Who there is: every tenant with what it has waiting; for the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_server.administration.tenant_view import list_tenants
from cotrain_server.ui.page import Look, Page

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN = 50
_LONGEST_SEARCH = 64


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data."""
    search = look.query.get("search", "")[:_LONGEST_SEARCH]
    found = await list_tenants(look.services, search, offset_of(look.query), SHOWN)
    return {"search": search, **found.model_dump()}


def offset_of(query: Mapping[str, str]) -> int:
    """Read how many rows to skip; 0 for what is no such number."""
    text = query.get("offset", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


PAGE = Page("/ui/tenants", "Tenants", "tenants.html", read, for_operator=True)
