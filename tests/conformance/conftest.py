"""A real server, and what happened when each official SDK ran every scenario through it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cotrain import ServiceClient
from tests.conformance.running import (
    CHECKPOINT_SCENARIOS,
    CHECKPOINT_SCENARIOS_OF,
    CHECKPOINTS,
    KEYS,
    LOSES_ANSWERS_OF,
    LOSES_CHECKPOINT_ANSWERS_OF,
    LOSES_SAMPLING_ANSWERS_OF,
    MINT_KEY,
    NEWER_FIRST,
    SAMPLING,
    SAMPLING_SCENARIOS,
    SCENARIOS,
    SDKS,
    CheckpointReport,
    Facts,
    Report,
    SamplingReport,
    Server,
    run_scenarios,
)
from tests.support.proxies import LossyProxy
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`cotrain serve` with a tiny model and five tenants."""
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")
    data_dir = tmp_path_factory.mktemp("data")
    settings = {"COTRAIN_TRUSTED_PROXIES": "127.0.0.1"}  # some clients come through one, from afar
    with Serving(data_dir, [str(folder)], (*KEYS, MINT_KEY), settings=settings) as serving:
        yield Server(serving.address, str(folder), data_dir)


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[ServiceClient]:
    """Our client of the first tenant."""
    with ServiceClient(server.address, KEYS[0]) as client:
        yield client


@pytest.fixture(scope="package", params=SDKS)
def report(request: pytest.FixtureRequest, server: Server) -> Report:
    """Run every scenario under one SDK."""
    sdk = request.param
    facts = run_scenarios(sdk, server.address, server.base_model, SCENARIOS)
    with LossyProxy(server.address, LOSES_ANSWERS_OF) as proxy:
        lossy_facts = run_scenarios(sdk, proxy.address, server.base_model, ["undisturbed"])
    return Report(sdk, facts, lossy_facts, proxy)


@pytest.fixture(scope="package", params=NEWER_FIRST)
def sampled(request: pytest.FixtureRequest, server: Server) -> SamplingReport:
    """Run every scenario of sampling under one SDK."""
    names = [*SAMPLING_SCENARIOS, "undisturbed"]
    facts = run_scenarios(request.param, server.address, server.base_model, names, SAMPLING)
    return SamplingReport(request.param, facts)


@pytest.fixture(scope="package")
def sampled_from_afar(sampled: SamplingReport, server: Server) -> tuple[LossyProxy, Facts]:
    """Sample under the same SDK through a proxy that loses answers."""
    with LossyProxy(server.address, LOSES_SAMPLING_ANSWERS_OF) as proxy:
        names = ["undisturbed"]
        return proxy, run_scenarios(sampled.sdk, proxy.address, server.base_model, names, SAMPLING)


@pytest.fixture(scope="package", params=NEWER_FIRST)
def checkpointed(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> CheckpointReport:
    """Run every scenario of checkpoints under one SDK."""
    sdk, folder = request.param, tmp_path_factory.mktemp("downloads")
    names = [*CHECKPOINT_SCENARIOS, *CHECKPOINT_SCENARIOS_OF[sdk], "undisturbed"]
    facts = run_scenarios(sdk, server.address, server.base_model, names, CHECKPOINTS, FOLDER=str(folder))
    return CheckpointReport(sdk, facts, folder)


@pytest.fixture(scope="package")
def checkpointed_from_afar(checkpointed: CheckpointReport, server: Server) -> tuple[LossyProxy, Facts]:
    """Save and load under the same SDK through a proxy that loses answers."""
    with LossyProxy(server.address, LOSES_CHECKPOINT_ANSWERS_OF) as proxy:
        facts = run_scenarios(*(checkpointed.sdk, proxy.address, server.base_model, ["undisturbed"], CHECKPOINTS))
        return proxy, facts


@pytest.fixture(scope="package")
def narrow_server(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that lets a tenant have few samples, and few training requests, waiting."""
    settings = {"COTRAIN_QUOTAS": "samples=4,ops=16"}
    data = tmp_path_factory.mktemp("narrow")
    with Serving(data, [server.base_model], KEYS, settings=settings) as serving:
        yield Server(serving.address, server.base_model, data)
