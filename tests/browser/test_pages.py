"""The pages in a real browser: what they show is true, for the operator and for a tenant, in every light."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

import cotrain
from cotrain_server.ui.navigation import PAGES
from tests.browser.browsing import BASE_MODEL, step

if TYPE_CHECKING:
    from tests.browser.browsing import Site

expect = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: `pip install playwright`"
).expect

pytestmark = pytest.mark.browser

OPEN = [page.path for page in PAGES if page.in_navigation]
OWN = [page.path for page in PAGES if page.in_navigation and not page.for_operator]


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_checks(
    site: Site, axe: str, path: str, scheme: str
) -> None:
    with site.seen_by("operator", scheme=scheme) as seen:  # type: ignore[arg-type]
        page = seen.open(path)
        page.evaluate(axe)
        found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
        assert found == []


@pytest.mark.parametrize("path", [*OPEN, "RUN"])
def test_no_page_scrolls_sideways_on_a_small_phone(site: Site, path: str) -> None:
    path = f"/ui/runs/{site.runs['alice'].run}" if path == "RUN" else path
    with site.seen_by("operator", width=360) as seen:
        page = seen.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_hostile_name_stays_text(site: Site) -> None:
    with site.seen_by("operator") as seen:
        for path in ("/ui/runs", f"/ui/runs/{site.runs['alice'].run}"):
            page = seen.open(path)
            expect(page.get_by_text("<img src=x onerror").first).to_be_visible()
            assert page.locator("img").count() == 0


def test_no_foreign_id_stands_in_a_tenants_pages(site: Site) -> None:
    admin = {"X-API-Key": site.admin_key}
    rows = httpx.get(f"{site.address}/ui/runs.json", headers=admin).json()["runs"]
    foreign = next(row for row in rows if row["run"] == site.runs["alice"].run)
    session = foreign["run"].partition(":")[0]
    cycle = httpx.get(f"{site.address}/ui/cycles.json", headers=admin).json()
    with site.seen_by("bob") as seen:
        last = f"/ui/cycles/{cycle['pool']}/{cycle['timeline']['cycles'][-1]['cycle']}"
        for path in (*OWN, last, f"/ui/runs/{site.runs['bob'].run}"):
            html = seen.open(path).content()
            for secret in (foreign["tenant"], session, "alice", "<img", "onerror"):
                assert secret not in html, (path, secret)
    for path in (f"/ui/runs/{foreign['run']}", f"/ui/compare.json?run={foreign['run']}"):
        answer = httpx.get(site.address + path, headers={"X-API-Key": site.keys["bob"]})
        assert answer.status_code == 404
        assert foreign["tenant"] not in answer.text


def test_two_tenants_share_a_cycles_bar_in_two_colours(site: Site) -> None:
    clients = [
        cotrain.ServiceClient(base_url=site.address, api_key=key).create_lora_training_client(
            BASE_MODEL, rank=4
        )
        for key in site.keys.values()
    ]
    threads = [
        threading.Thread(target=lambda own=own: [step(own) for _ in range(12)]) for own in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with site.seen_by("operator") as seen:
        page = seen.open("/ui/cycles")
        bars = page.locator("svg.cycles a")
        colours = [
            set(re.findall(r'class="(s\d)"', bars.nth(number).inner_html()))
            for number in range(bars.count())
        ]
        assert {"s0", "s1"} in colours
        legend = page.inner_text("ul.legend >> nth=0")
        assert "alice" in legend
        assert "bob" in legend
        number = next(n for n, found in enumerate(colours) if found == {"s0", "s1"})
        bars.nth(number).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=re.compile("Cycle"))).to_be_visible()
        assert page.locator("tbody tr").count() == 2


def test_a_checkpoint_is_published_kept_for_a_time_and_deleted(site: Site) -> None:
    with site.seen_by("bob") as seen:
        page = seen.open("/ui/checkpoints")
        page.on("dialog", lambda asked: asked.accept())
        page.locator("details.menu summary").first.click()
        page.get_by_role("button", name="Publish").first.click()
        expect(page.get_by_text("every tenant", exact=True)).to_be_visible()
        page.locator("details.menu summary").first.click()
        page.locator("input[name=days]").first.fill("3")
        page.get_by_role("button", name="Set").first.click()
        expect(page.get_by_text("in 2 d")).to_be_visible()
        page.locator("details.menu summary").first.click()
        with page.expect_download() as fetched:
            page.get_by_role("button", name="Download").first.click()
        assert fetched.value.suggested_filename.endswith(".tar")
        page.get_by_role("button", name="Delete").first.click()
        expect(page.get_by_text("No checkpoint yet")).to_be_visible()
    own = {"X-API-Key": site.keys["bob"]}
    assert httpx.get(f"{site.address}/api/v1/checkpoints", headers=own).json()["checkpoints"] == []


def test_the_keyboard_reaches_every_page_and_the_content(site: Site) -> None:
    with site.seen_by("operator") as seen:
        page = seen.open("/ui")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        reached = set()
        for _ in range(len(OPEN) + 2):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.getAttribute('href')"))
        assert set(OPEN) <= reached


def test_a_killed_worker_is_a_problem_within_15_s_until_it_is_back(site: Site) -> None:
    admin = {"X-API-Key": site.admin_key}
    with site.seen_by("operator") as seen:
        page = seen.open("/ui")
        expect(page.get_by_text("All is well")).to_be_visible(timeout=30_000)
        worker = int(re.findall(r"worker-w0 started \(pid (\d+)\)", site.serving.log)[-1])
        os.killpg(worker, signal.SIGSTOP)
        try:
            expect(page.get_by_text("without a heartbeat")).to_be_visible(timeout=15_000)
        finally:
            os.killpg(worker, signal.SIGKILL)
        expect(page.get_by_text("All is well")).to_be_visible(timeout=120_000)
    assert httpx.get(f"{site.address}/status", headers=admin).json()["ready"]


def test_pictures_for_the_docs(site: Site) -> None:
    folder = os.environ.get("PICTURES")
    if folder is None:
        pytest.skip("`make dashboard-pictures` draws them")
    with site.seen_by("operator") as seen:
        seen.open("/ui").screenshot(path=f"{folder}/dashboard-overview.png")
    with site.seen_by("alice", scheme="dark") as seen:
        page = seen.open(f"/ui/runs/{site.runs['alice'].run}")
        page.screenshot(path=f"{folder}/dashboard-run.png")
