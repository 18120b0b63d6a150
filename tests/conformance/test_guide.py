"""Every Python block of the guide and of README, run on a real server.

The blocks of a page share their names, in order, as the cells of a notebook do; `await` may stand
anywhere. What stands in `<!-- check … -->` runs as well and is what a page claims. A block marked
`<!-- not run: reason -->` is only compiled (`tests/unit/test_docs.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.running import KEYS
from tests.support.markdown import blocks

if TYPE_CHECKING:
    from tests.conformance.running import Server
    from tests.support.markdown import Block

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
RUNNABLE = [page for page in PAGES if any(not each.reason_not_run for each in blocks(page))]


@pytest.mark.filterwarnings("default::DeprecationWarning:tinker")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_every_block_runs(
    page: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_BASE_URL", server.address)
    monkeypatch.setenv("COTRAIN_API_KEY", KEYS[0])
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.chdir(tmp_path)  # where pages write their files
    written = {
        "http://127.0.0.1:8000": server.address,
        "tml-...": KEYS[0],
        "Qwen/Qwen3-0.6B": server.base_model,
    }
    names: dict[str, Any] = {"__name__": page.stem}
    with asyncio.Runner() as runner:
        try:
            for block in blocks(page):
                if not block.reason_not_run:
                    _run(block, written, names, runner)
        finally:
            _close_clients(names)


def _run(
    block: Block, written: dict[str, str], names: dict[str, Any], runner: asyncio.Runner
) -> None:
    result = eval(block.compile(written), names)
    if inspect.iscoroutine(result):  # it awaits something
        runner.run(result)


def _close_clients(names: dict[str, Any]) -> None:
    for value in list(names.values()):
        if hasattr(value, "create_lora_training_client") and not isinstance(value, type):
            value.close("success")
