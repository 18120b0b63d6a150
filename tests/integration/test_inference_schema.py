"""Fuzz the endpoints of other APIs, with a worker behind them: nothing sent is ever our error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.support.draws import examples
from tests.support.http_api import ALICE, POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import talking_api
from tests.support.waiting import PATIENCE_S

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
