"""A real Chromium, Debian's, and a real server with two tenants that have trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.browsing import Site, train
from tests.support.serving import Serving

if TYPE_CHECKING:
    # Playwright is there for `make test-browser` alone.
    from playwright.sync_api import Browser

ALICE, BOB = "tml-alice_0123456789abcdef0123", "tml-bob_0123456789abcdef0123456"
#: A name that a page must show as text.
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Chromium; the tests are skipped, and say so, where there is none.

    It ends with its module: as long as Playwright is there an event loop counts as running in this thread, and
    tests of other modules could start none.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium here: `apt-get install chromium`")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: `make test-browser` installs it")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server on which Alice trained 30 steps and Bob 12."""
    from tests.support.tiny_models import build_tiny_qwen3

    folder = tmp_path_factory.mktemp("pages")
    model = build_tiny_qwen3(folder / "tiny")
    keys = [f"alice={ALICE}", f"bob={BOB}"]
    with Serving(folder / "data", [f"tiny={model}"], keys) as serving:
        operator = (folder / "data" / "admin-key").read_text().strip()
        runs = {"alice": train(serving.address, ALICE, HOSTILE, 30), "bob": train(serving.address, BOB, "math", 12)}
        keys_by_name = {"alice": ALICE, "bob": BOB}
        yield Site(serving, chromium, operator, keys_by_name, runs, folder / "data", f"tiny={model}")


AXE = (Path(__file__).parent / "axe-core-4.14.1.min.js").read_text()


@pytest.fixture(scope="session")
def axe() -> str:
    """The accessibility checker that is run within a page."""
    return AXE
