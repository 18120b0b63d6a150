"""Measure every SDK version and other programs against a server of our own, and write docs/reference/compatibility.md.

Run as `python -m tests.conformance.scoreboard [VERSION…]` from the root, after `sdks.sh all` and `programs/install.sh`.
With versions, those alone are measured and their part of the page goes to the terminal instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tests.conformance.programs import __main__ as programs
from tests.conformance.running import KEYS, ROOT
from tests.conformance.scoreboard.page import HistoryEntries, render
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

VERSIONS = ("0.22.0", "0.25.0", "0.30.1", "0.33.1", "0.38.0")
INSTALLED = "0.38.0"
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
PATIENCE_S = 1800


def walk(sdk: str, address: str, base_model: str, *rows: str, exchanging: str = "") -> HistoryEntries:
    """Walk through one SDK in a process of its own; with names of rows, through those alone.

    `exchanging` is the address of a server that gives every API key a token.
    """
    folder = ROOT / ".sdk" / f"tinker-{sdk}"
    environment = {
        **os.environ,
        "PYTHONPATH": "" if sdk == INSTALLED else str(folder),
        "TINKER_BASE_URL": address,
        "EXCHANGING_BASE_URL": exchanging,
        "TINKER_API_KEY": KEYS[0],
        "OTHER_API_KEY": KEYS[1],
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    module = "tests.conformance.scoreboard.walk"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, base_model, *rows],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found: HistoryEntries = json.loads(done.stdout)
    assert found["version"] == sdk, f"walked {found['version']}; run tests/conformance/sdks.sh all"
    return found


def main(versions: tuple[str, ...]) -> None:
    """Serve a tiny model, run the programs, walk through each version, and write the page."""
    other = "" if versions else programs.measured()  # first, because it fails if one is not installed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base_model = str(build_tiny_qwen3(folder / "tiny"))
        with (
            Serving(folder / "data", [base_model], KEYS) as serving,
            Serving(
                *(folder / "exchanging", [base_model], KEYS), settings={"COTRAIN_JWT_AUTH": "always"}
            ) as exchanging,
        ):
            founds = [
                walk(sdk, serving.address, base_model, exchanging=exchanging.address) for sdk in versions or VERSIONS
            ]
    page = render(founds, datetime.now(UTC).date())
    if versions:
        print(page)
    else:
        PAGE.write_text(f"{page.rstrip()}\n\n{other}")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
