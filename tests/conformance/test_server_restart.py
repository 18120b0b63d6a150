"""API, worker, scheduler and Redis die under a training loop; its author is not told, and need not be."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cotrain import AdamParams, Datum, ModelInput, RequestFailed, ServiceClient
from tests.conformance.running import KEYS
from tests.support.ports import free_port
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

STEPS = 12
KILLED_AFTER = 4
PATIENCE_S = 300


def batch(step: int) -> list[Datum]:
    rng = random.Random(step)
    rows = [rng.choices(range(512), k=length + 1) for length in (5, 9, 13)]
    return [
        Datum(
            model_input=ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]


def train(service: ServiceClient, base_model: str, after: Callable[[int], None]) -> list[float]:
    """Train with two steps in flight, as the guide teaches; returns every loss."""
    run = service.create_lora_training_client(base_model, rank=4, seed=3)
    losses, flying = [], []
    for step in range(STEPS):
        passed = run.forward_backward(batch(step), "cross_entropy")
        flying.append((passed, run.optim_step(AdamParams(learning_rate=1e-2))))
        if len(flying) == 2:
            done, stepped = flying.pop(0)
            losses.append(done.result().metrics["loss:sum"])
            stepped.result()
            after(step)
    losses += [done.result().metrics["loss:sum"] for done, _ in flying]
    return [*losses, run.forward(batch(0), "cross_entropy").result().metrics["loss:sum"]]


@dataclass(frozen=True)
class Outlived:
    """Results of clients whose server was killed and started again."""

    disturbed: list[float]
    undisturbed: list[float]
    failure: RequestFailed
    """Error of a large pass that the kill interrupted."""
    norms: list[float]
    """Norm of the gradient of the run of that pass, and of its twin."""


@pytest.fixture(scope="module")
def outlived(tmp_path_factory: pytest.TempPathFactory) -> Outlived:
    """Kill all processes of a server while a loop trains and a large pass runs, and start it again."""
    folder = tmp_path_factory.mktemp("outlived")
    model = str(build_tiny_qwen3(folder / "tiny"))
    options = [f"--port={free_port()}"]
    large = [each for step in range(500) for each in batch(step)]
    inputs = {"target_tokens": [1, 2], "weights": [3e38, 3e38]}  # a loss beyond float32
    large[1300] = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    is_under_way, is_killed = threading.Event(), threading.Event()

    def note(step: int) -> None:
        if step == KILLED_AFTER:
            is_under_way.set()
        if step == STEPS - 2:
            assert is_killed.wait(PATIENCE_S)  # never over before

    with ThreadPoolExecutor(1) as pool:
        with Serving(folder / "data", [model], KEYS, options) as serving:
            service = ServiceClient(serving.address, KEYS[0])
            undisturbed = train(service, model, after=lambda _: None)
            runs = [service.create_lora_training_client(model, rank=4, seed=3) for _ in range(2)]
            for run in runs:
                run.forward_backward(batch(0), "cross_entropy").result()
            disturbed = pool.submit(train, service, model, note)
            assert is_under_way.wait(PATIENCE_S)
            failing = runs[0].forward_backward(large, "cross_entropy")
            asyncio.run(failing.accepted_async())
            serving.kill()
            is_killed.set()
        assert not disturbed.done()
        with Serving(folder / "data", [model], KEYS, options), service:
            with pytest.raises(RequestFailed) as failed:
                failing.result(PATIENCE_S)
            stepped = [run.optim_step().result(PATIENCE_S).metrics or {} for run in runs]
            return Outlived(
                disturbed.result(PATIENCE_S), undisturbed, failed.value, [metrics["grad_norm"] for metrics in stepped]
            )


def test_a_training_loop_outlives_every_process_of_its_server(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    found: Outlived = request.getfixturevalue("outlived")
    assert found.disturbed == found.undisturbed
    assert len(found.undisturbed) == STEPS + 1
    logged = [*caplog.get_records("setup"), *caplog.records]
    assert not [record for record in logged if record.levelname == "ERROR"]


def test_a_large_pass_that_fails_over_a_dead_server_leaves_the_gradient_before_it(outlived: Outlived) -> None:
    assert "Loss is not finite" in str(outlived.failure)
    assert outlived.norms[0] == outlived.norms[1] > 0
