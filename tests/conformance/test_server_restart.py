"""API, worker, scheduler and Redis die under a training loop; its author is not told, and need not be."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cotrain import AdamParams, Datum, ModelInput, ServiceClient
from tests.conformance.running import KEYS
from tests.support.ports import free_port
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

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
