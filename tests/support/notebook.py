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
    """Run the blocks and checks of a page. Clients that it leaves open are closed.

    A client whose name a later block binds again is closed too. Otherwise its sockets would stay open until some other
    test collects garbage, and that test would fail.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    clients: dict[int, Any] = {}
    with asyncio.Runner() as runner:
        try:
            for block in blocks(page):
                if block.reason_not_run:
                    continue
                result = eval(block.compile(replacements), names)
                if inspect.iscoroutine(result):  # a block that awaits something
                    runner.run(result)
                clients |= _clients_in(names)
        finally:
            for client in (clients | _clients_in(names)).values():
                client.close("success")


def _clients_in(names: Mapping[str, Any]) -> dict[int, Any]:
    """Return the service clients among the names, by identity."""
    found = (value for value in names.values() if not isinstance(value, type))
    return {id(value): value for value in found if hasattr(value, "create_lora_training_client")}


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), json.loads(sys.argv[2]))
