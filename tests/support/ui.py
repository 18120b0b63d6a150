"""Browser steps for tests without a browser: logging in and sending forms."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

#: Header of a browser in a request of the server's own page.
FROM_HERE = {"Sec-Fetch-Site": "same-origin"}


async def log_in(http: httpx.AsyncClient, key: str, target: str = "/ui") -> httpx.Response:
    """Send the form with a key. The client keeps the session's cookie."""
    return await http.post("/ui/login", data={"key": key, "next": target}, headers=FROM_HERE)


async def log_out(http: httpx.AsyncClient) -> httpx.Response:
    """Send the form of the logout button."""
    return await send(http, "/ui/logout", {})


async def send(http: httpx.AsyncClient, path: str, fields: Mapping[str, str]) -> httpx.Response:
    """Send a form as a page of this session would."""
    return await http.post(path, data=dict(fields), headers=FROM_HERE)
