"""Notebooks in a real kernel of Jupyter."""

from __future__ import annotations

from typing import Any

import nbformat
from nbclient import NotebookClient

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


def test_long_waits_update_one_output_of_their_cell() -> None:
    cells: list[Any] = [
        {"cell_type": "code", "metadata": {}, "source": WAITS, "outputs": []} for _ in range(2)
    ]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    notebook: Any = nbformat.from_dict(content)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=60).execute()
    cleared = {"output_type": "display_data", "metadata": {}, "data": {"text/plain": ""}}
    assert [cell.outputs for cell in notebook.cells] == [[cleared], [cleared]]
