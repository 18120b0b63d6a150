"""Values of `model` in requests of other APIs, the required ownership, and a fuzz test: no request is a server error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import response_schema_conformance

from cotrain_store.sampling.claims import ClaimedSample
from tests.support.draws import examples
from tests.support.http_api import ALICE, BOB, POOL, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import count_waiting
from tests.support.stand_in import StandIn, stand_in
from tests.support.talking import talking_api, write_language
from tests.support.waiting import PATIENCE_S, until


@asynccontextmanager
async def speaking_api(redis: EmbeddedRedis, **changes: Any) -> AsyncIterator[tuple[Api, StandIn]]:
    """Run the API with a worker that the test controls, and that has written its tokenizer."""
    async with running_api(redis.url, **changes) as api:
        write_language(api.services.settings.data_dir)
        with stand_in(api.services) as worker:
            yield api, worker


async def save(api: Api, worker: StandIn, run: str, seq: int, name: str) -> str:
    """Save the run's weights under a name. Return their path."""
    body = {"model_id": run, "seq_id": seq, "path": name}
    assert (await api.post("save_weights_for_sampler", body)).status_code == 200
    await worker.run_log()
    return f"tinker://{run}/sampler_weights/{name}"


async def complete(api: Api, model: str, key: str = ALICE) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": model, "prompt": "Hi"}
    return await api.http.post("/oai/api/v1/completions", json=body, headers=headers)


async def sampled(api: Api, worker: StandIn, model: str, key: str = ALICE) -> ClaimedSample:
    """Request a completion and resolve it. Return the sample that the worker received."""
    asking = asyncio.create_task(complete(api, model, key))
    while not (claims := worker.claim()):
        assert not asking.done(), (await asking).text
        await asyncio.sleep(0.005)
    worker.finish(claims[0].request, [5])
    assert (await asking).status_code == 200
    return claims[0]


async def test_one_sampler_serves_all_requests_until_the_name_moves(empty_redis: EmbeddedRedis) -> None:
    async with speaking_api(empty_redis) as (api, worker):
        run = await api.new_run()
        path = await save(api, worker, run, 1, "best")
        first = await sampled(api, worker, path)
        again = await sampled(api, worker, path)
        assert again.sampler == first.sampler
        assert again.request != first.request
        await save(api, worker, run, 2, "best")
        moved = await sampled(api, worker, path)
        assert moved.weights == f"{run}:2"
        assert moved.sampler != first.sampler


async def test_no_client_is_notified_of_a_result_that_nobody_polls(empty_redis: EmbeddedRedis) -> None:
    async with speaking_api(empty_redis) as (api, worker):
        claimed = await sampled(api, worker, POOL.base_model)
        assert await api.services.connection.keys(f"cotrain:completions:{claimed.sampler}:*") == []


async def test_two_tenants_have_two_samplers_of_one_base_model(empty_redis: EmbeddedRedis) -> None:
    async with speaking_api(empty_redis) as (api, worker):
        mine = await sampled(api, worker, POOL.base_model)
        other = await sampled(api, worker, POOL.base_model, key=BOB)
        assert other.sampler != mine.sampler


async def test_weights_of_another_base_model_are_rejected(empty_redis: EmbeddedRedis) -> None:
    async with speaking_api(empty_redis) as (api, worker):
        path = await save(api, worker, await api.new_run(), 1, "good")
        answer = await complete(api, f"other/model;{path}")
        assert answer.status_code == 400
        assert POOL.base_model in answer.json()["error"]["message"]


async def test_a_stopping_server_cancels_its_requests(empty_redis: EmbeddedRedis) -> None:
    async with speaking_api(empty_redis, long_poll_s=40) as (api, worker):
        asking = asyncio.create_task(complete(api, POOL.base_model))
        await api.until_held(asking)
        api.services.drain()
        answer = await asking
        assert answer.status_code == 503
        assert float(answer.headers["retry-after"]) > 0
        await until(lambda: not count_waiting(worker.sampling._redis, POOL.id))  # cancelled concurrently


CHECKS = [not_a_server_error, response_schema_conformance]


def test_no_request_in_another_apis_words_is_our_error(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {ALICE}"}
    with talking_api(empty_redis.url, tmp_path) as talking:
        url = f"{talking.address}/openapi.json"
        api = schemathesis.openapi.from_url(url, timeout=PATIENCE_S)
        found = api.include(path_regex="^/(oai|anthropic)/").get_all_operations()
        operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
        assert len(operations) == 10
        for operation in operations:

            @settings(max_examples=examples(12, at_least=4), suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:
                if isinstance(case.body, dict):  # past the 404, where there is more to break
                    case.body["model"] = POOL.base_model
                case.call_and_validate(headers=headers, checks=CHECKS, timeout=PATIENCE_S)

            ask()
        assert talking.script.seen, "nothing came as far as the worker"
