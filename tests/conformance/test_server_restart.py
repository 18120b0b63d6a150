"""API, worker, scheduler and Redis die under a training loop; its author is not told, and need not be."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def test_a_training_loop_outlives_every_process_of_its_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(build_tiny_qwen3(tmp_path / "tiny"))
    options = [f"--port={free_port()}"]
    is_under_way, is_killed = threading.Event(), threading.Event()

    def note(step: int) -> None:
        if step == KILLED_AFTER:
            is_under_way.set()
        if step == STEPS - 2:
            assert is_killed.wait(PATIENCE_S)  # never over before

    with ThreadPoolExecutor(1) as pool:
        with Serving(tmp_path / "data", [model], KEYS, options) as serving:
            service = ServiceClient(serving.address, KEYS[0])
            undisturbed = train(service, model, after=lambda _: None)
            disturbed = pool.submit(train, service, model, note)
            assert is_under_way.wait(PATIENCE_S)
            serving.kill()
            is_killed.set()
        assert not disturbed.done()
        with Serving(tmp_path / "data", [model], KEYS, options), service:
            assert disturbed.result(PATIENCE_S) == undisturbed
    assert len(undisturbed) == STEPS + 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_large_pass_that_fails_over_a_dead_server_leaves_the_gradient_before_it(
    tmp_path: Path,
) -> None:
    model = str(build_tiny_qwen3(tmp_path / "tiny"))
    options = [f"--port={free_port()}"]
    large = [each for step in range(500) for each in batch(step)]
    inputs = {"target_tokens": [1, 2], "weights": [3e38, 3e38]}  # a loss beyond float32
    large[1300] = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    with Serving(tmp_path / "data", [model], KEYS, options) as serving:
        service = ServiceClient(serving.address, KEYS[0])
        runs = [service.create_lora_training_client(model, rank=4, seed=3) for _ in range(2)]
        for run in runs:
            run.forward_backward(batch(0), "cross_entropy").result()
        failing = runs[0].forward_backward(large, "cross_entropy")
        asyncio.run(failing.accepted_async())
        serving.kill()
    with Serving(tmp_path / "data", [model], KEYS, options), service:
        with pytest.raises(RequestFailed, match="Loss is not finite"):
            failing.result(PATIENCE_S)
        left, undisturbed = (run.optim_step().result(PATIENCE_S).metrics for run in runs)
        assert left is not None
        assert undisturbed is not None
        assert left["grad_norm"] == undisturbed["grad_norm"] > 0
