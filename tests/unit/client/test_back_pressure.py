"""Training loops faster than their server: a call blocks until the server has accepted requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from typing_extensions import override

from cotrain import ServiceClient, TrainingClient
from cotrain.errors import ClientClosed
from cotrain.requests import flow_control as flow
from tests.support.fake_api import FakeApi, refusal
from tests.support.waiting import until

LIMIT = 10
STEPS = 40
PATIENCE_S = 120


@dataclass
class SlowApi(FakeApi):
    """Server that accepts an optimizer step only when it is allowed to."""

    may_take: threading.Event = field(default_factory=threading.Event)

    @override
    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await super()._answer(request)
        if request.url.path.endswith("optim_step"):
            await until(self.may_take.is_set)
        return answer


class Loop:
    """Training loop that never waits for a result."""

    def __init__(self, run: TrainingClient) -> None:
        self.sent = 0
        self.is_at_the_limit = threading.Event()
        self._run = run

    def __call__(self) -> list[float]:
        futures = []
        for _ in range(STEPS):
            futures.append(self._run.optim_step())
            self.sent += 1
            if self.sent == LIMIT:
                self.is_at_the_limit.set()
        return [(future.result(PATIENCE_S).metrics or {})["grad_norm"] for future in futures]


@pytest.fixture
def api() -> SlowApi:
    return SlowApi()


@pytest.fixture
def service(api: SlowApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    monkeypatch.setattr(flow, "IN_FLIGHT_REQUESTS", LIMIT)
    with ServiceClient("http://server", "tml-key", network=api.network) as service:
        yield service


def test_a_loop_faster_than_its_server_blocks_until_requests_are_accepted(api: SlowApi, service: ServiceClient) -> None:
    loop = Loop(service.create_lora_training_client("m"))
    with ThreadPoolExecutor(1) as pool:
        losses = pool.submit(loop)
        loop.is_at_the_limit.wait(PATIENCE_S)
        assert api.paths().count("optim_step") <= LIMIT
        service.get_server_capabilities()  # which do not delay others
        assert loop.sent == LIMIT
        api.may_take.set()
        assert losses.result(PATIENCE_S) == [1.0] * STEPS
    assert [body["seq_id"] for body in api.bodies("optim_step")] == list(range(1, STEPS + 1))


def test_closing_the_client_raises_in_a_call_that_blocks(api: SlowApi, service: ServiceClient) -> None:
    loop = Loop(service.create_lora_training_client("m"))
    with ThreadPoolExecutor(1) as pool:
        losses = pool.submit(loop)
        loop.is_at_the_limit.wait(PATIENCE_S)
        service.close()
        with pytest.raises(ClientClosed):
            losses.result(PATIENCE_S)


def test_a_full_server_gets_the_requests_of_a_run_in_order(api: SlowApi, service: ServiceClient) -> None:
    api.may_take.set()
    api.answers["optim_step"] = [refusal(429, "full", **{"Retry-After": "0.001"})] * 25
    loop = Loop(service.create_lora_training_client("m"))
    assert loop() == [1.0] * STEPS
    taken = [body["seq_id"] for body in api.bodies("optim_step")][25:]
    assert taken == list(range(1, STEPS + 1))
