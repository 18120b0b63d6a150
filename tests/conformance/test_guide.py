"""Runner of every Python block of the guide and of README, and of every notebook, on a real server.

The blocks of a page share their names, in order, like the cells of a notebook. Code in `<!-- check
… -->` also runs and verifies the claims of a page. A block marked `<!-- not run: reason -->` is
only compiled (`tests/unit/test_docs.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conformance.running import KEYS, Server
from tests.support.markdown import blocks
from tests.support.notebook import run_page
from tests.warm.popen import Popen, run

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


NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
CHECKS = {
    "sft": "assert losses[-1] < losses[0] - 1, losses",
    "rl": "assert metrics['shared_prompts:mean'] > 0.5 and len(means) == STEPS, metrics",
    "sweep": "assert len({losses[0] for losses in curves}) == 1 and best > 0, curves",
}
"""Checks after the last cell of each notebook."""
WAITS = """
import time
from cotrain.transport import progress
progress.SHOWN_AFTER_S, progress.DRAWN_EVERY_S = 0.0, 0.01
waiting = progress.Progress()
texts = []
show = waiting._output.show
waiting._output.show = lambda text: (texts.append(text), show(text))
for _ in range(2):
    with waiting.waiting(lambda: f"step {len(texts)}"):
        while len(texts) < 10:
            time.sleep(0.01)
assert texts[0] == "cotrain: waiting 0 s for step 0", texts
"""


def forked(command: list[str], **how: Any) -> Popen:
    """Start a kernel without the options of the interpreter, so that it is forked."""
    return Popen([part for part in command if not part.startswith("-X")], **how)


def cell(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": []}


def test_notebooks_are_stored_without_outputs_and_in_one_format() -> None:
    assert {path.stem for path in NOTEBOOKS.iterdir() if path.suffix == ".ipynb"} == CHECKS.keys()
    for path in NOTEBOOKS.glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        nbformat.validate(notebook)
        ran = [each for each in notebook["cells"] if each.get("outputs") or each.get("execution_count")]
        assert ran == []


def test_every_notebook_runs_and_shows_one_line_for_each_wait_and_result(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTRAIN_BASE_URL", server.address)
    monkeypatch.setenv("COTRAIN_API_KEY", KEYS[0])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("jupyter_client.launcher.Popen", forked)
    cells = [cell(WAITS), cell(WAITS)]
    for name, check in CHECKS.items():  # in one kernel, because its start takes long
        own = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        sources = ["".join(each["source"]) for each in own if each["cell_type"] == "code"]
        cells += [*map(cell, sources), cell(f"{check}\nservice.close()\n%reset -f")]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    notebook: Any = nbformat.from_dict(content)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=120).execute()
    cleared = {"output_type": "display_data", "metadata": {}, "data": {"text/plain": ""}}
    assert [each.outputs for each in notebook.cells[:2]] == [[cleared], [cleared]]
    shown = [
        output.data["text/plain"]
        for each in notebook.cells
        for output in each.outputs
        if output.output_type == "execute_result"
    ]
    assert len(shown) > len(CHECKS)
    assert all(len(text) < 400 for text in shown), shown
    assert not [each for each in shown if each.startswith("<Future") and "\n" in each]
