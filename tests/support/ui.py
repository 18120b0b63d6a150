"""Browser steps for tests without a browser: logging in and sending forms."""

from __future__ import annotations

import re
from collections.abc import Mapping

import httpx


async def log_in(http: httpx.AsyncClient, key: str, target: str = "/ui") -> httpx.Response:
    """Open the form and send it with a key. The client keeps the session's cookie."""
    form = await http.get("/ui/login")
    body = {"key": key, "csrf": csrf_of(form.text), "next": target}
    return await http.post("/ui/login", data=body)


async def log_out(http: httpx.AsyncClient) -> httpx.Response:
    """Send the form of the logout button."""
    return await send(http, "/ui/logout", {})


async def send(http: httpx.AsyncClient, path: str, fields: Mapping[str, str]) -> httpx.Response:
    """Send a form as a page of this session would."""
    page = await http.get("/ui")
    return await http.post(path, data={**fields, "csrf": csrf_of(page.text)})


def csrf_of(page: str) -> str:
    """Return the token of a page's forms."""
    token: str = re.findall(r'name="csrf" (?:value|content)="([^"]+)"', page)[0]
    return token
