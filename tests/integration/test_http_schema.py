"""Fuzz test of every route of the OpenAPI over a real socket: no request causes a server error."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cotrain_server.app import create_app
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.redis_client.connection import open_connection
from tests.support.draws import examples
from tests.support.http_api import ALICE, BOB, POOL, pass_body, publish_pool, sample_body
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import FILES, stand_in
from tests.support.waiting import PATIENCE_S

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CALL_BY_KIND = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
#: Well below the limit of the HTTP/1.1 server for a request line; above it, the server answers
#: itself.
LONGEST_QUERY = 16_000
#: Operations that end an object used by others run last, and the deletion of the key at the very
#: end.
ENDINGS = ("POST /api/v1/unload_model", "POST /api/v1/sessions/{session_id}/finish", "DELETE")


@dataclass(frozen=True)
class Server:
    """Address and settings of the API."""

    address: str
    settings: ServerSettings


schemathesis.serializer.alias("application/x-protobuf", "application/octet-stream")


@pytest.fixture(scope="module")
def server(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run the API in a thread, as uvicorn runs it."""
    folder = tmp_path_factory.mktemp("api")
    redis_server.flush()
    publish_pool(redis_server.url, folder)
    its_settings = ServerSettings(
        redis_url=redis_server.url, data_dir=folder, api_keys=(ALICE, BOB), disk_reserve_bytes=0
    )
    config = uvicorn.Config(create_app(its_settings, long_poll_s=0.05), port=0, log_config=None)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        thread.join(0.01)
    address = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield Server(address, its_settings)
    running.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def operations(server: Server) -> list[Any]:
    """List the operations, those that end an object last.

    The list is kept, because the preparation of its requests takes long.
    """
    # /readyz correctly answers 503: there is neither scheduler nor worker here.
    url = f"{server.address}/openapi.json"
    api = schemathesis.openapi.from_url(url, timeout=PATIENCE_S).exclude(path="/readyz")
    found = [operation.ok() for operation in api.get_all_operations() if isinstance(operation, Ok)]
    assert len(found) > 50
    return sorted(found, key=lambda operation: operation.label.startswith(ENDINGS))


def test_no_valid_request_causes_a_server_error(server: Server, operations: list[Any]) -> None:
    answered = fuzz(server, operations, GenerationMode.POSITIVE, examples(6, at_least=2))
    # Most requests name existing objects, so a good part must be served.
    assert answered["served"] > answered["refused"] / 3


def test_no_request_that_violates_the_schema_causes_a_server_error(server: Server, operations: list[Any]) -> None:
    answered = fuzz(server, operations, GenerationMode.NEGATIVE, examples(3, at_least=1))
    assert answered["refused"] > answered["served"]


def fuzz(server: Server, operations: list[Any], mode: GenerationMode, most: int) -> Counter[str]:
    """Send requests of every operation in many variants. Count the outcomes."""
    real = make_ids(server)
    answered = Counter[str]()
    for operation in operations:

        @settings(max_examples=most, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode), asks_for_real=st.sampled_from([True, True, False]))
        def ask(case: Any, asks_for_real: bool) -> None:
            assume(len(str(case.query)) < LONGEST_QUERY)
            if asks_for_real:  # use existing objects, where more can fail than a 404
                put_in(case, real)
            answer = case.call_and_validate(headers={"X-API-Key": ALICE}, checks=CHECKS, timeout=PATIENCE_S)
            answered["served" if answer.status_code < 400 else "refused"] += 1

        if mode is GenerationMode.POSITIVE or can_be_wrong(operation):
            ask()
    return answered


def can_be_wrong(operation: Any) -> bool:
    """Return True if a request can violate the schema, which is impossible if everything is valid."""
    has_schema = any("json" in body.media_type for body in operation.body)  # all bytes fit a file
    return bool(has_schema or operation.query or operation.definition.raw.get("security"))


def put_in(case: Any, real: dict[str, Any]) -> None:
    """Replace made-up ids by existing ones."""
    for asked in (case.body, case.path_parameters, case.query):
        if isinstance(asked, dict):
            asked |= {name: real[name] for name in asked if name in real}


def make_ids(server: Server) -> dict[str, Any]:
    """Make one object of every kind. Return their ids, by field and parameter."""
    headers = {"X-API-Key": ALICE}
    base_url = f"{server.address}/api/v1"
    with httpx.Client(base_url=base_url, headers=headers, timeout=PATIENCE_S) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "base_model": POOL.base_model}
        run = http.post("create_model", json={**body, "model_seq_id": 0}).json()["model_id"]
        sampler = http.post("create_sampling_session", json={**body, "sampling_session_seq_id": 0})
        sampling_session = sampler.json()["sampling_session_id"]
        http.post("asample", json=sample_body(sampling_session, 0))
        request = http.post("forward_backward", json=pass_body(run, 1)).json()["request_id"]
        for seq, call in enumerate(CALL_BY_KIND.values(), 2):
            http.post(call, json={"model_id": run, "seq_id": seq, "path": "a"})
        asyncio.run(run_log(server))
        write_files(server)
        external = f"training_runs/{run}/checkpoints/external_weights/a/external_weights_urls"
        link = http.get(external).json()["urls"]["adapter_config.json"]
    path = f"tinker://{run}/weights/a"
    return {
        **body,
        "model_id": run,
        "run_id": run,
        "kind": "external_weights",
        "name": "a",
        "file": "adapter_config.json",
        "token": link.split("/")[-2],
        "path": path,
        "model_path": path,
        "tinker_path": path,
        "source_path": path,
        "source_paths": [path, path],
        "reference_model_path": path,
        "request_id": request,
        "sampling_session_id": sampling_session,
        "target": {"type": "sampling_session", "sampling_session_id": sampling_session},
    }


async def run_log(server: Server) -> None:
    """Run a worker that commits the queued ops."""
    connection = open_connection(server.settings.redis_url)
    services = cast("Services", SimpleNamespace(settings=server.settings, connection=connection))
    with stand_in(services) as worker:
        await worker.run_log()
    await connection.aclose()


def write_files(server: Server) -> None:
    """Write the files of a worker for every save of the stand-in."""
    digest = FILES[0]
    folder = server.settings.data_dir / "weights" / digest[:2] / digest
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
