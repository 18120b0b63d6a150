"""The pages in a real browser: what they show is true, for the operator and for a tenant, in every light."""

from __future__ import annotations

import os
import re
import signal
import threading

import httpx
import pytest

from cotrain_server.ui.router import PAGES
from tests.browser.browsing import Site, new_run, step

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: `make test-browser` installs it").expect

pytestmark = pytest.mark.browser

OPEN = [page.path for page in PAGES if page.in_navigation and not page.for_tenant]
OWN = [page.path for page in PAGES if page.in_navigation and not page.for_operator]


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_passes_the_accessibility_checks(site: Site, axe: str, path: str, scheme: str) -> None:
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


def test_a_comparison_hides_a_run_and_draws_the_others(site: Site) -> None:
    runs = "&".join(f"run={each.run}" for each in site.runs.values())
    with site.seen_by("operator") as seen:
        page = seen.open(f"/ui/compare?{runs}")
        page.get_by_role("button", name="math").click()
        page.get_by_label("Log scale").check()
        page.get_by_label("Clip outliers").check()
        expect(page.get_by_role("button", name="math")).to_have_attribute("aria-pressed", "false")
        shown = page.locator("#chart-loss .u-series:not(.u-off) .u-label")
        expect(shown.filter(has_text="math")).to_have_count(0)
        expect(page.locator("#chart-loss canvas")).to_be_visible()


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
    clients = [new_run(site, who) for who in site.keys]
    threads = [threading.Thread(target=lambda own=own: [step(own) for _ in range(12)]) for own in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with site.seen_by("operator") as seen:
        page = seen.open("/ui/cycles")
        bars = page.locator("svg.cycles a")
        colours = [set(re.findall(r'class="(s\d)"', bars.nth(number).inner_html())) for number in range(bars.count())]
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


def test_a_small_phones_navigation_shows_the_page_that_is_open(site: Site) -> None:
    with site.seen_by("operator", width=360) as seen:
        for path in OPEN:
            page = seen.open(path)
            inner, outer = (page.locator(each).bounding_box() for each in ("nav [aria-current=page]", "nav"))
            assert inner
            assert outer
            assert inner["x"] > outer["x"] - 1, path
            assert inner["x"] + inner["width"] < outer["x"] + outer["width"] + 1, path


def test_a_pause_holds_one_tenant_until_it_is_resumed(site: Site) -> None:
    held, free = new_run(site, "alice"), new_run(site, "bob")
    losses: list[float] = []
    stop = threading.Event()

    def train_on() -> None:
        while not stop.is_set():
            losses.append(step(held))

    def stands_still() -> bool:
        known = len(losses)
        for _ in range(3):
            step(free)
        return len(losses) == known

    training = threading.Thread(target=train_on)
    with site.seen_by("operator") as seen:
        page = seen.open("/ui/tenants")
        page.on("dialog", lambda asked: asked.accept())
        page.get_by_role("link", name="alice").click()
        training.start()
        page.fill("input[name=reason]", "until noon")
        page.get_by_role("button", name="Pause").click()
        try:
            assert any(stands_still() for _ in range(30))  # the scheduler knows it within a second
            assert stands_still()
            own = page.context.new_page()
            own.goto(f"{site.address}/ui/runs/{held.model_id}")
            expect(own.get_by_text("has paused this tenant: until noon.")).to_be_visible()
            known = len(losses)
        finally:
            stop.set()
            page.get_by_role("button", name="Resume").click()
        training.join(60)
        assert len(losses) == known + 1
        expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_a_run_is_held_back_and_ended_from_its_page(site: Site) -> None:
    run = new_run(site, "bob")
    step(run)
    with site.seen_by("bob") as seen:
        page = seen.open(f"/ui/runs/{run.model_id}")
        assert page.get_by_role("button", name="run").count() == 0
    with site.seen_by("operator") as seen:
        page = seen.open(f"/ui/runs/{run.model_id}")
        page.on("dialog", lambda asked: asked.accept())
        page.fill("input[name=reason]", "too large")
        page.get_by_role("button", name="Pause this run").click()
        page.get_by_role("button", name="Resume this run").click()
        page.get_by_role("button", name="End this run").click()
        expect(page.get_by_text("The run has ended")).to_be_visible()
        assert page.get_by_role("button", name="this run").count() == 0


def test_a_worker_is_drained_while_it_trains_and_nothing_is_lost(site: Site) -> None:
    undisturbed = new_run(site, "bob", seed=3)
    expected = [step(undisturbed) for _ in range(16)]
    run = new_run(site, "alice", seed=3)
    losses = [step(run) for _ in range(2)]
    stop = threading.Event()

    def train_on() -> None:
        while not stop.is_set():
            losses.append(step(run))

    training = threading.Thread(target=train_on)
    with site.seen_by("operator") as seen:
        page = seen.open("/ui/workers")
        page.on("dialog", lambda asked: asked.accept())
        old, new = (page.get_by_role("region", name=f"Worker {name} of tiny") for name in ("w0", "w1"))
        training.start()
        try:
            old.get_by_role("button", name="Drain").click()
            expect(page.get_by_text("it keeps its runs until there is one")).to_be_visible(timeout=15_000)
            with site.another_worker("w1"):
                expect(old.get_by_text("drained", exact=True)).to_be_visible(timeout=120_000)
                expect(new.get_by_text("serving", exact=True)).to_be_visible()
                known = len(losses)
                while len(losses) < known + 2:
                    page.wait_for_timeout(100)
                old.get_by_role("button", name="Take it back").click()
                expect(old.get_by_text("serving", exact=True)).to_be_visible(timeout=15_000)
                new.get_by_role("button", name="Drain").click()
                expect(new.get_by_text("drained", exact=True)).to_be_visible(timeout=60_000)
                new.get_by_role("button", name="Take it back").click()
        finally:
            stop.set()
            training.join(60)
    losses += [step(run) for _ in range(max(0, 16 - len(losses)))]
    assert losses[:16] == pytest.approx(expected, rel=1e-6)


def test_a_killed_worker_is_a_problem_within_15_s_until_it_is_back(site: Site) -> None:
    admin = {"X-API-Key": site.admin_key}
    with site.seen_by("operator") as seen:
        page = seen.open("/ui")
        expect(page.get_by_text("All is well")).to_be_visible(timeout=30_000)
        worker = int(re.findall(r"worker-w0 started \(pid (\d+)\)", site.serving.log)[-1])
        os.killpg(worker, signal.SIGSTOP)
        try:
            expect(page.get_by_text("No worker").first).to_be_visible(timeout=15_000)
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
    with site.seen_by("bob", scheme="dark") as seen:  # Alice's run has a name for tests
        page = seen.open(f"/ui/runs/{site.runs['bob'].run}")
        page.screenshot(path=f"{folder}/dashboard-run.png")
