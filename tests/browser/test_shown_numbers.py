"""Pages in a real browser, checked against the answers of the server; part of every test run."""

from __future__ import annotations

import json

import httpx
import pytest

from cotrain_server.ui.router import PAGES
from tests.browser.browsing import BASE_MODEL, Site

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: `make test-browser` installs it").expect

LIVE = [page.path for page in PAGES if page.poll_s and page.in_navigation]


def test_the_overviews_numbers_are_those_of_status(site: Site) -> None:
    with site.seen_by("operator") as seen:
        text = seen.open("/ui").inner_text("#pool-1")
    status = httpx.get(f"{site.address}/status", headers={"X-API-Key": site.admin_key}).json()
    (pool,) = status["pools"]
    assert f"Last cycle\n{pool['last_cycle']:,}" in text
    assert f"Requests waiting\n{pool['queue']['ops']:,}" in text
    assert f"{pool['samples']['running']} running" in text
    assert pool["workers"][0]["id"] in text


def test_thirty_steps_are_thirty_points_with_the_clients_losses(site: Site) -> None:
    run = site.runs["alice"]
    with site.seen_by("alice") as seen:
        page = seen.open(f"/ui/runs/{run.run}")
        drawn = json.loads(page.get_attribute("#chart-loss", "data-chart") or "")
        assert page.locator("#chart-loss canvas").count() == 1
        expect(page.get_by_text("Steps").locator("xpath=following-sibling::dd")).to_have_text("30")
    own = {"X-API-Key": site.keys["alice"]}
    usage = httpx.get(f"{site.address}/ui/usage.json", headers=own).json()
    assert {each["name"]: each["used"] for each in usage["quotas"]}["history_points"] == 30
    assert drawn["x"] == list(range(1, 31))
    assert drawn["series"][0]["values"] == pytest.approx(run.losses, rel=1e-12)


@pytest.mark.parametrize("path", LIVE)
def test_a_page_refreshes_its_data(site: Site, path: str) -> None:
    with site.seen_by("operator") as seen:
        page = seen.open(path)
        page.evaluate("document.addEventListener('htmx:afterSettle', () => (document.body.dataset.settled = 1))")
        page.evaluate("htmx.trigger('#live', 'resume')")
        expect(page.locator("body[data-settled]")).to_be_visible()


def test_seeded_answers_on_the_page_equal_those_of_the_api(site: Site) -> None:
    with site.seen_by("alice") as seen:
        page = seen.open("/ui/playground")
        page.fill("textarea[name=prompt]", "one two three")
        page.fill("input[name=max_tokens]", "8")
        page.fill("input[name=seed]", "5")
        page.get_by_role("button", name="Ask").click()
        answers = page.locator("#answers section")
        expect(answers).to_have_count(2, timeout=60_000)
        shown = {
            answer.locator("h2").inner_text(): answer.locator(".said span").evaluate_all(
                "spans => spans.map(span => span.title.split(',')[0])"
            )
            for answer in answers.all()
        }
    assert any(model.endswith("/sampler_weights/final") for model in shown)
    assert shown == {model: logprobs_of(site, model) for model in (BASE_MODEL, max(shown, key=len))}


def logprobs_of(site: Site, model: str) -> list[str]:
    """Return the log-probs of the API for the same request, formatted as on the page."""
    body = {
        "model": model, "prompt": "one two three", "max_tokens": 8, "seed": 5,
        "temperature": 0.7, "logprobs": 0,
    }  # fmt: skip
    answer = httpx.post(
        f"{site.address}/oai/api/v1/completions", json=body, headers={"X-API-Key": site.keys["alice"]}, timeout=60
    )
    logprobs = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return [f"log-prob {logprob:.5g}" for logprob in logprobs]
