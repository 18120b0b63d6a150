"""How the conformance tests run a program of scenarios under one official SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.lossy_proxy import LossyProxy

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scenarios.py")
# Where each official SDK is: the newer one is installed, the older one fetched by sdks.sh.
SDKS: Mapping[str, Path | None] = {"0.38.0": None, "0.22.0": ROOT / ".sdk" / "tinker-0.22.0"}
SCENARIOS = (
    "create",
    "train",
    "train_async",
    "chunked",
    "accumulate",
    "forward",
    "losses",
    "soft_targets",
    "custom",
    "failures",
    "two_tenants",
    "undisturbed",
)
LOSES_ANSWERS_OF = {
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "retrieve_future",
}
KEYS = ("tml-one_c2VjcmV0LW9uZQ", "tml-two_c2VjcmV0LXR3bw")
TIMEOUT_S = 170


@dataclass(frozen=True)
class Server:
    """Where the server is and what it serves."""

    address: str
    base_model: str


@dataclass(frozen=True)
class Report:
    """What one SDK met: straight to the server, and through a proxy that loses answers."""

    sdk: str
    facts: dict[str, Any]
    lossy_facts: dict[str, Any]
    proxy: LossyProxy


def run_scenarios(sdk: str, address: str, base_model: str, names: Sequence[str]) -> dict[str, Any]:
    """Run scenarios in a process of their own and return their facts, by scenario."""
    folder = SDKS[sdk]
    environment = {
        **os.environ,
        "PYTHONPATH": "" if folder is None else str(folder),
        "TINKER_API_KEY": KEYS[0],
        "OTHER_API_KEY": KEYS[1],
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), address, base_model, *names],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["version"] == sdk
    return facts
