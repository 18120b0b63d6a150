"""Access to the pages: login, cookie, forms of other sites, logout, headers of every answer, and a dashboard below a path."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from urllib.parse import urljoin

import httpx
import pytest

from cotrain_server.ui.access import COOKIE
from cotrain_server.ui.router import PAGES
from cotrain_store import redis_keys
from cotrain_store.tenants.api_keys import Tenants
from tests.support.http_api import ADMIN_KEY, ALICE, BOB, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.ui import log_in, log_out, send


async def test_the_root_url_redirects_to_the_pages(api: Api) -> None:
    home = await api.http.get("/")
    assert (home.status_code, home.headers["location"]) == (303, "/ui")
    page = await api.http.get("/ui")
    assert (page.status_code, page.headers["location"]) == (303, "/ui/login?next=%2Fui")


async def test_a_key_opens_a_session_that_a_logout_ends(api: Api) -> None:
    answer = await log_in(api.http, ALICE, target="/ui?pool=p")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui?pool=p")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "Path=/ui", "SameSite=strict"} <= set(re.split("[;,] ", cookie))
    assert "Secure" not in cookie
    assert ALICE not in cookie
    assert (await api.http.get("/ui")).status_code == 200

    assert (await log_out(api.http)).status_code == 303
    assert (await api.http.get("/ui")).status_code == 303


@pytest.mark.parametrize("key", [ALICE, ADMIN_KEY])
async def test_a_copied_cookie_is_rejected_after_the_logout(empty_redis: EmbeddedRedis, key: str) -> None:
    async with running_api(empty_redis.url) as api, running_api(empty_redis.url) as other:
        await log_in(api.http, key)
        copy = {"Cookie": f"{COOKIE}={api.http.cookies[COOKIE]}"}
        await log_in(other.http, key)
        assert (await log_out(api.http)).status_code == 303
        for each in (api, other):  # every process rejects it
            jar, each.http.cookies = each.http.cookies, httpx.Cookies()
            assert (await each.http.get("/ui", headers=copy)).status_code == 303
            assert (await each.http.get("/ui/overview.json", headers=copy)).status_code == 401
            sent = await each.http.post("/ui/tenants", data={"name": "x"}, headers=copy)
            assert sent.status_code == 401
            each.http.cookies = jar
        assert (await other.http.get("/ui")).status_code == 200  # another login of the same key


async def test_over_https_the_cookie_is_sent_only_over_https(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, public_url="https://train.example/") as api:
        answer = await log_in(api.http, ALICE)
        assert "Secure" in answer.headers["set-cookie"].split("; ")


@pytest.mark.parametrize("key", ["", "tml-wrong_key", ADMIN_KEY[:-1], "eyJhbGciOi", "ключ"])
async def test_a_wrong_key_is_rejected(api: Api, key: str) -> None:
    answer = await log_in(api.http, key)
    assert answer.status_code == 401
    assert "neither the admin key nor a valid API key" in answer.text
    assert COOKIE not in api.http.cookies
    assert key not in answer.text or not key


async def test_wrong_keys_of_one_address_are_throttled(api: Api) -> None:
    statuses = [(await log_in(api.http, "tml-guess_it")).status_code for _ in range(11)]
    assert statuses == [401] * 10 + [429]
    assert (await log_in(api.http, ADMIN_KEY)).status_code == 303


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({}, True),  # no browser
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind-a-proxy.example"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "", "Origin": "http://here.example:8000"}, False),
        ({"Origin": "http://here.example:8000"}, True),
        ({"Origin": "https://train.example"}, True),
        ({"Origin": "http://here.example:9000"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "https://train.example.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": ""}, False),
        ({"Origin": "http://["}, False),
    ],
)
async def test_a_form_of_another_site_is_refused(
    empty_redis: EmbeddedRedis, headers: dict[str, str], is_own: bool
) -> None:
    headers = {"Host": "here.example:8000", **headers}
    async with running_api(empty_redis.url, public_url="https://train.example/") as api:
        login = await api.http.post("/ui/login", data={"key": ADMIN_KEY}, headers=headers)
        assert login.status_code == (303 if is_own else 403)
        api.http.cookies.clear()
        cookie = re.split("[=;]", (await log_in(api.http, ADMIN_KEY)).headers["set-cookie"])[1]
        headers["Cookie"] = f"{COOKIE}={cookie}"
        made = await api.http.post("/ui/tenants", data={"name": "ann"}, headers=headers)
        assert made.status_code == (200 if is_own else 403)
        assert is_own or "Another site sent this form." in made.text
        assert (await api.http.post("/ui/logout", headers=headers)).status_code == (303 if is_own else 403)
        assert (await api.http.get("/ui", headers=headers)).status_code == (303 if is_own else 200)


@pytest.mark.parametrize("target", ["https://evil.example", "//evil.example", "/ui/\\evil", "/uix"])
async def test_a_login_redirects_only_to_own_pages(api: Api, target: str) -> None:
    assert (await log_in(api.http, ALICE, target)).headers["location"] == "/ui"


@pytest.mark.parametrize("cookie", ["x", "a.b", "é.b", "W10.x", "."])
async def test_a_forged_cookie_is_rejected(api: Api, cookie: str) -> None:
    header = {"Cookie": f"{COOKIE}={cookie}".encode()}
    assert (await api.http.get("/ui", headers=header)).status_code == 303  # type: ignore[arg-type]


async def test_a_session_ends_with_its_key_and_has_its_role(api: Api) -> None:
    """Another process revokes a key: no cache of this process keeps the session open."""
    tenants, elsewhere = api.services.tenants, Tenants(api.services.connection)

    async def open_session() -> str:
        key = await tenants.issue("carol", not_after=time.time() + 3600)
        assert (await log_in(api.http, key)).status_code == 303
        assert (await api.http.get("/ui")).status_code == 200
        return key.split("_")[0].removeprefix("tml-")

    async def change(key_id: str, field: str, value: str) -> None:
        await api.services.connection.hset(redis_keys.api_key(key_id), field, value)

    key_id = await open_session()
    assert (await send(api.http, "/ui/playground", {})).status_code == 200
    await change(key_id, "role", "viewer")
    assert (await send(api.http, "/ui/playground", {})).status_code == 403
    assert (await api.http.get("/ui")).status_code == 200
    await elsewhere.revoke(key_id)
    assert (await api.http.get("/ui")).status_code == 303
    await change(await open_session(), "not_after", "1.0")
    assert (await api.http.get("/ui")).status_code == 303


async def test_a_changed_admin_key_ends_the_operators_sessions(api: Api) -> None:
    await log_in(api.http, ADMIN_KEY)
    assert (await api.http.get("/ui")).status_code == 200
    api.services.admin_key = "another-key-of-the-operator"
    assert (await api.http.get("/ui")).status_code == 303


@pytest.mark.parametrize("page", [page for page in PAGES if "{" not in page.path], ids=lambda p: p.name)
async def test_every_page_has_a_security_policy_and_no_inline_code(api: Api, page: object) -> None:
    await log_in(api.http, BOB if page.for_tenant else ADMIN_KEY)  # type: ignore[attr-defined]
    answer = await api.http.get(page.path)  # type: ignore[attr-defined]
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["cache-control"] == "no-store"
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", answer.text) == []
    assert re.findall(r"(?:src|href|action)=\"(?!/|#|\?)", answer.text) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "{" not in page.path], ids=lambda p: p.name)
async def test_every_page_has_a_twin_for_a_key(api: Api, page: object) -> None:
    twin = page.twin  # type: ignore[attr-defined]
    assert (await api.http.get(twin)).status_code == 401
    answer = await api.http.get(twin, headers={"X-API-Key": ADMIN_KEY})
    assert answer.status_code == (404 if page.for_tenant else 200)  # type: ignore[attr-defined]
    own = await api.http.get(twin, headers={"Authorization": f"Bearer {BOB}"})
    assert own.status_code == (404 if page.for_operator else 200)  # type: ignore[attr-defined]
    assert own.headers["content-type"] == "application/json"


async def test_a_fragment_requested_after_the_session_leads_to_the_login(api: Api) -> None:
    answer = await api.http.get("/ui", headers={"HX-Request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/ui/login")
    await log_in(api.http, ALICE)
    part = await api.http.get("/ui", headers={"HX-Request": "true"})
    assert part.status_code == 200
    assert "<html" not in part.text


async def test_only_own_static_files_are_served_and_they_are_cached(api: Api) -> None:
    (css,) = re.findall(r'"(/ui/static/app\.css[^"]+)"', (await api.http.get("/ui/login")).text)
    file = await api.http.get(css)
    assert file.headers["content-type"].startswith("text/css")
    assert "immutable" in file.headers["cache-control"]
    assert "cache-control" not in (await api.http.get("/ui/static/app.css")).headers
    for other in ("../rendering.py", "%2e%2e/rendering.py", "none.css", "../../../etc/passwd"):
        assert (await api.http.get(f"/ui/static/{other}")).status_code == 404


async def test_no_page_of_the_framework_loads_scripts_from_another_host(api: Api) -> None:
    assert [(await api.http.get(path)).status_code for path in ("/docs", "/redoc")] == [404, 404]
    assert (await api.http.get("/openapi.json")).status_code == 200


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
    assert "API key, or the admin key" in (await follow(browser, f"{PREFIX}/")).text
    body = {"key": ADMIN_KEY, "next": "/ui/tenants"}
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
    left_by = await browser.post(f"{PREFIX}/ui/logout")
    assert left_by.headers["location"] == f"{PREFIX}/ui/login"


async def test_who_is_not_logged_in_is_led_to_the_form_below_the_path(browser: httpx.AsyncClient) -> None:
    part = await browser.get(f"{PREFIX}/ui", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["HX-Redirect"]) == (401, f"{PREFIX}/ui/login")
