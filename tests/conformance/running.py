"""Runner of scenario programs under one official SDK."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.draws import variant
from tests.support.proxies import LossyProxy
from tests.warm.popen import run

Facts = dict[str, Any]

ROOT = Path(__file__).parents[2]
# Folder of each official SDK: the newer one is installed, the older one is fetched by sdks.sh.
SDKS: Mapping[str, Path | None] = {"0.38.0": None, "0.22.0": ROOT / ".sdk" / "tinker-0.22.0"}
NEWER, OLDER = SDKS
#: The older SDK differs little outside of training.
NEWER_FIRST = (NEWER, variant(OLDER))
SCENARIOS = (
    "create",
    "train",
    "train_async",
    "chunked",
    "one_bad",
    "accumulate",
    "forward",
    "losses",
    "soft_targets",
    "custom",
    "failures",
    "two_tenants",
    "undisturbed",
)
LOSES_ANSWERS_OF = {"create_model", "forward", "forward_backward", "optim_step", "retrieve_future"}
SAMPLING = "sampling_scenarios"
SAMPLING_SCENARIOS = (
    "sampled",
    "chosen",
    "stopped",
    "scored",
    "saved",
    "crowded",
    "pickled",
    "cancelled",
    "refused",
    "reinforced",
)
CHECKPOINTS = "checkpoint_scenarios"
CHECKPOINT_SCENARIOS = ("restored", "discarded", "named", "kept", "deleted", "published", "sampled")
# Scenarios that only one of the SDKs supports.
CHECKPOINT_SCENARIOS_OF = {"0.38.0": ("copied", "exported"), "0.22.0": ("archived",)}
LOSES_CHECKPOINT_ANSWERS_OF = {
    "copy_weights",
    "load_weights",
    "publish",
    "save_weights",
    "save_weights_external",
    "save_weights_for_sampler",
    "weights_info",
}
LOSES_SAMPLING_ANSWERS_OF = {*LOSES_ANSWERS_OF, "asample", "create_sampling_session", "retrieve_futures"}
KEYS = ("tml-one_c2VjcmV0LW9uZQ", "tml-two_c2VjcmV0LXR3bw", "tml-three_c2VjcmV0LTM", "tml-four_c2VjcmV0LTQ")
MINT_KEY = "sk-mint_c2VjcmV0LW1pbnQ"
KEY_NAMES = ("TINKER_API_KEY", "OTHER_API_KEY", "THIRD_API_KEY", "FOURTH_API_KEY")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Server:
    """Address and base model of the server."""

    address: str
    base_model: str
    data_dir: Path


@dataclass(frozen=True)
class Report:
    """Facts of one SDK: directly to the server, and through a proxy that drops answers."""

    sdk: str
    facts: Facts
    lossy_facts: Facts
    proxy: LossyProxy


@dataclass(frozen=True)
class SamplingReport:
    """Facts of one SDK's sampling scenarios."""

    sdk: str
    facts: Facts


@dataclass(frozen=True)
class CheckpointReport:
    """Facts of one SDK's checkpoint scenarios, and its download folder."""

    sdk: str
    facts: Facts
    folder: Path


def run_scenarios(
    sdk: str, address: str, base_model: str, names: Sequence[str], program: str = "scenarios", **variables: str
) -> Facts:
    """Run scenarios of a program in a separate process and return their facts, by scenario.

    `variables` are added to its environment.
    """
    folder = SDKS[sdk]
    if folder is not None and not folder.is_dir():
        pytest.fail(f"tinker {sdk} is missing: run tests/conformance/sdks.sh")
    environment = {
        **os.environ,
        "PYTHONPATH": "" if folder is None else str(folder),
        **dict(zip(KEY_NAMES, KEYS, strict=True)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    done = run(
        [*(sys.executable, "-W", "ignore", "-m", f"tests.conformance.{program}"), *(address, base_model, *names)],
        cwd=ROOT,
        timeout=TIMEOUT_S,
        env=environment,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    facts: Facts = json.loads(done.stdout)
    assert facts["version"] == sdk
    return facts
