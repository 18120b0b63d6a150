"""The dashboard below the path of COTRAIN_PUBLIC_URL, whether or not a proxy takes the path off."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from urllib.parse import urljoin

import httpx
import pytest

from tests.support.http_api import ADMIN_KEY, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.ui import csrf_of

PREFIX = "/cotrain"
LINK = re.compile(r'(?:href|src|action|hx-post|hx-get)="(/[^"]*)"')


@pytest.fixture(params=[True, False], ids=["proxy takes it off", "proxy leaves it"])
async def browser(empty_redis: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A browser before a proxy that serves the server below a path."""
    async with running_api(empty_redis.url, public_url=f"http://localhost{PREFIX}/") as api:
        if request.param:

            async def take_off(asked: httpx.Request) -> None:
                path = asked.url.raw_path.decode()
                assert path.startswith(f"{PREFIX}/"), path
                asked.url = asked.url.copy_with(raw_path=path.removeprefix(PREFIX).encode())

            # A hook runs after the cookies for the browser's address were chosen.
            api.http.event_hooks = {"request": [take_off]}
        yield api.http


async def follow(browser: httpx.AsyncClient, path: str) -> httpx.Response:
    """Open a page and go where it leads."""
    answer = await browser.get(path)
    while answer.is_redirect:
        path = urljoin(path, answer.headers["location"])
        answer = await browser.get(path)
    return answer


async def test_every_page_is_reached_by_its_links_and_forms(browser: httpx.AsyncClient) -> None:
    form = await follow(browser, f"{PREFIX}/")
    body = {"key": ADMIN_KEY, "csrf": csrf_of(form.text), "next": "/ui/tenants"}
    answer = await browser.post(f"{PREFIX}/ui/login", data=body)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{PREFIX}/ui/tenants")
    cookies = answer.headers.get_list("set-cookie")
    assert all(f"Path={PREFIX}/ui" in each for each in cookies)
    cookie = cookies[0].partition(";")[0]
    browser.headers["Cookie"] = cookie
    seen, left = set[str](), [f"{PREFIX}/ui"]
    while left:
        seen.add(path := left.pop())
        page = await follow(browser, path)
        assert page.status_code in (200, 405), path  # the latter: a form's target
        assert '"/ui' not in page.text or "json" in page.headers["content-type"], path
        if "html" in page.headers["content-type"]:
            left += set(LINK.findall(page.text)) - seen - set(left)
    assert f"{PREFIX}/ui/runs.json" in seen
    assert any(f"{PREFIX}/ui/static/app.js" in each for each in seen)
    token = csrf_of((await browser.get(f"{PREFIX}/ui")).text)
    left_by = await browser.post(f"{PREFIX}/ui/logout", data={"csrf": token})
    assert left_by.headers["location"] == f"{PREFIX}/ui/login"


async def test_who_is_not_logged_in_is_led_to_the_form_below_the_path(browser: httpx.AsyncClient) -> None:
    part = await browser.get(f"{PREFIX}/ui", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["HX-Redirect"]) == (401, f"{PREFIX}/ui/login")
