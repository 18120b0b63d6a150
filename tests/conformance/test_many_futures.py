"""Many futures of one client, and many callers of one run, on a real server."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cotrain import AdamParams, Datum, Future, ModelInput, ServiceClient, TrainingClient
from cotrain.types import ForwardBackwardOutput
from tests.conformance.running import KEYS, Server

#: Far more than the 16 waiting requests that this server accepts from a tenant. A thousand futures
#: are in tests/unit/client/test_many_requests.py.
MANY = 45
STEP_EVERY = 15
"""Futures per group: 14 passes and a step. The plain loop waits for each group."""
THREADS = 4
OF_EACH = 6
WITHIN_S = 240.0
"""Time limit that detects a deadlock; it does not measure speed."""


def datum(length: int, seed: int) -> Datum:
    tokens = random.Random(seed).choices(range(512), k=length + 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


def send(run: TrainingClient, index: int) -> Future[Any]:
    if index % STEP_EVERY == STEP_EVERY - 1:
        return run.optim_step(AdamParams(learning_rate=1e-2))
    return run.forward_backward([datum(1 + index % 7, seed=index)], "cross_entropy")


def told(result: Any) -> object:
    """Return the content of a result without its times."""
    metrics = {name: value for name, value in result.metrics.items() if "clock_cycle" not in name}
    outputs = getattr(result, "loss_fn_outputs", [])
    return metrics, [output["logprobs"].tolist() for output in outputs]


def one_group_at_a_time(run: TrainingClient) -> list[object]:
    results = []
    for start in range(0, MANY, STEP_EVERY):
        futures = [send(run, index) for index in range(start, start + STEP_EVERY)]
        results += [told(future.result(WITHIN_S)) for future in reversed(futures)][::-1]
    return results


def test_many_futures_give_the_results_of_the_plain_loop(
    narrow_server: Server,
) -> None:
    with ServiceClient(narrow_server.address, KEYS[0]) as service:
        runs = [
            service.create_lora_training_client(narrow_server.base_model, rank=2, seed=1)
            for _ in range(2)
        ]
        expected = one_group_at_a_time(runs[0])
        futures = [send(runs[1], index) for index in range(MANY)]
        assert [told(future.result(WITHIN_S)) for future in futures] == expected


def test_threads_and_an_event_loop_on_one_run_each_keep_their_order(
    service: ServiceClient, server: Server
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2, seed=1)
    data = [datum(5, seed=5)]

    def cycles(outputs: list[ForwardBackwardOutput]) -> list[float]:
        return [output.metrics["clock_cycle:unique"] for output in outputs]

    def in_a_thread(_: int) -> list[float]:
        futures = [run.forward_backward(data, "cross_entropy") for _ in range(OF_EACH)]
        return cycles([future.result(WITHIN_S) for future in futures])

    async def in_a_loop() -> list[float]:
        sent = [run.forward_backward_async(data, "cross_entropy") for _ in range(OF_EACH)]
        first = await sent[0]
        middle = sent[1].result(WITHIN_S)  # blocks this event loop, which has no other task
        rest = await asyncio.gather(*(each.result_async(WITHIN_S) for each in sent[2:]))
        return cycles([await first, middle, *rest])

    with ThreadPoolExecutor(THREADS + 1) as callers:
        of_loop = callers.submit(asyncio.run, in_a_loop())
        seen = [*callers.map(in_a_thread, range(THREADS)), of_loop.result(WITHIN_S)]
    assert all(one == sorted(one) for one in seen)
    twin = service.create_lora_training_client(server.base_model, rank=2, seed=1)
    for _ in range((THREADS + 1) * OF_EACH):
        twin.forward_backward(data, "cross_entropy")
    steps = [each.optim_step().result(WITHIN_S).metrics or {} for each in (run, twin)]
    # One gradient per call, none twice: equal addends have one sum in any order.
    assert steps[0]["grad_norm"] == steps[1]["grad_norm"] > 0
