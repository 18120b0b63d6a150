"""Fuzz every route of the OpenAPI over a real socket: whatever is sent, it is never our error."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import response_schema_conformance

from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from tests.support.http_api import ALICE, POOL, publish_pool, sample_body

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.support.redis_server import EmbeddedRedis

CHECKS = [not_a_server_error, response_schema_conformance]

schemathesis.serializer.alias("application/x-protobuf", "application/octet-stream")


@pytest.fixture(scope="module")
def server(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the API in a thread, as uvicorn runs it; its address."""
    folder = tmp_path_factory.mktemp("api")
    redis_server.flush()
    publish_pool(redis_server.url, folder)
    config = uvicorn.Config(_app(redis_server.url, folder), port=0, log_config=None)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


@pytest.mark.parametrize(("key", "examples"), [(ALICE, 20), ("tml-wrong_key", 2)])
def test_no_request_is_our_error(server: str, key: str, examples: int) -> None:
    headers = {"X-API-Key": key}
    real_ids = make_ids(server)
    # /readyz says 503 with reason: there is neither scheduler nor worker here.
    api = schemathesis.openapi.from_url(f"{server}/openapi.json").exclude(path="/readyz")
    operations = [found.ok() for found in api.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 15
    for operation in operations:

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):  # past the 404, where there is more to break
                case.body |= {name: real for name, real in real_ids.items() if name in case.body}
            if "sampling_session_id" in case.path_parameters:
                case.path_parameters = {"sampling_session_id": real_ids["sampling_session_id"]}
            case.call_and_validate(headers=headers, checks=CHECKS)

        ask()


def make_ids(server: str) -> dict[str, Any]:
    """Open a session with one run and one sampler."""
    with httpx.Client(base_url=f"{server}/api/v1", headers={"X-API-Key": ALICE}) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "base_model": POOL.base_model}
        run = http.post("create_model", json={**body, "model_seq_id": 0}).json()
        sampler = {**body, "sampling_session_seq_id": 0}
        name = http.post("create_sampling_session", json=sampler).json()["sampling_session_id"]
        http.post("asample", json=sample_body(name, 0))
    target = {"type": "sampling_session", "sampling_session_id": name}
    return {**body, **run, "sampling_session_id": name, "target": target}


def _app(redis_url: str, folder: Path) -> Any:
    return create_app(
        ServerSettings(
            redis_url=redis_url,
            data_dir=folder,
            api_keys=ALICE,
            disk_reserve_bytes=0,
            long_poll_s=0.05,
        )
    )
