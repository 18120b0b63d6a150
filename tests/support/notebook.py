"""A page of documentation run as a notebook: its Python blocks in order, with shared names.

`await` is allowed at the top level. `python -m tests.support.notebook PAGE JSON` runs it in its own
process. The JSON maps texts of the page to their replacements.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.markdown import blocks


def run_page(page: Path, replacements: Mapping[str, str]) -> None:
    """Run the blocks and checks of a page. Clients that it leaves open are closed."""
    names: dict[str, Any] = {"__name__": page.stem}
    with asyncio.Runner() as runner:
        try:
            for block in blocks(page):
                if block.reason_not_run:
                    continue
                result = eval(block.compile(replacements), names)
                if inspect.iscoroutine(result):  # a block that awaits something
                    runner.run(result)
        finally:
            _close_clients(names)


def _close_clients(names: Mapping[str, Any]) -> None:
    for value in list(names.values()):
        if hasattr(value, "create_lora_training_client") and not isinstance(value, type):
            value.close("success")


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), json.loads(sys.argv[2]))
