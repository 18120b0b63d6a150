"""Runner of every Python block of the guide and of README on a real server.

The blocks of a page share their names, in order, like the cells of a notebook. Code in `<!-- check
… -->` also runs and verifies the claims of a page. A block marked `<!-- not run: reason -->` is
only compiled (`tests/unit/test_docs.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conformance.running import KEYS, Server
from tests.support.markdown import blocks
from tests.support.notebook import run_page
from tests.warm.popen import run

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = [
    page
    for folder in ("get-started", "guide")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if page.stem != "images"  # on a server with such a model: `test_images.py`
]


@pytest.fixture
def replacements(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Prepare the files and variables that pages assume.

    Return the replacements for placeholders in the pages.
    """
    monkeypatch.setenv("COTRAIN_BASE_URL", server.address)
    monkeypatch.setenv("COTRAIN_API_KEY", KEYS[0])
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.chdir(tmp_path)  # the folder in which pages write their files
    return {"http://127.0.0.1:8000": server.address, "tml-...": KEYS[0], "Qwen/Qwen3-0.6B": server.base_model}


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_every_block_of_the_guide_runs(page: Path, replacements: Mapping[str, str]) -> None:
    assert any(not block.reason_not_run for block in blocks(page))
    run_page(page, replacements)


def test_every_block_of_the_readme_runs(replacements: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    # In a separate process: the official SDK, which it shows, leaves connections open.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    ran = run([sys.executable, "-m", "tests.support.notebook", str(README), json.dumps(replacements)])
    assert ran.returncode == 0, ran.stderr
