"""A real server, and what happened when each official SDK ran every scenario through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.running import (
    KEYS,
    LOSES_ANSWERS_OF,
    SCENARIOS,
    SDKS,
    Report,
    Server,
    run_scenarios,
)
from tests.support.lossy_proxy import LossyProxy
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`cotrain serve` with a tiny model and two tenants."""
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")
    with Serving(tmp_path_factory.mktemp("data"), [str(folder)], KEYS) as serving:
        yield Server(serving.address, str(folder))


@pytest.fixture(scope="session", params=SDKS)
def report(request: pytest.FixtureRequest, server: Server) -> Report:
    """Run every scenario under one SDK."""
    sdk = request.param
    folder = SDKS[sdk]
    if folder is not None and not folder.is_dir():
        pytest.fail(f"tinker {sdk} is missing: run tests/conformance/sdks.sh")
    facts = run_scenarios(sdk, server.address, server.base_model, SCENARIOS)
    with LossyProxy(server.address, LOSES_ANSWERS_OF) as proxy:
        lossy_facts = run_scenarios(sdk, proxy.address, server.base_model, ["undisturbed"])
    return Report(sdk, facts, lossy_facts, proxy)
