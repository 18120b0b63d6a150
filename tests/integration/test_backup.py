"""A server that was copied goes on elsewhere as docs/operate/recovery.md tells it, with the same numbers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cotrain import AdamParams, Datum, Future, ModelInput, ServiceClient, TrainingClient
from cotrain.types import ForwardBackwardOutput, OptimStepResponse
from tests.support.ports import free_port
from tests.support.serving import Serving

PinnedBuffer = tuple[Future[ForwardBackwardOutput], Future[OptimStepResponse]]

KEY = "tml-restored_key-of-sixteen-letters"
PATIENCE_S = 300
#: Datums of a body that is too long for Redis (16 KB) and lies in the spool.
MANY = 8

ADAM = AdamParams(learning_rate=1e-2)

#: Loss and gradient norm of one step.
Numbers = tuple[float, float]


def datums(index: int) -> list[Datum]:
    """Make the batch of a step; every other one is large."""
    return [datum(index * 7 + number) for number in range(MANY if index % 2 else 1)]


def datum(first: int) -> Datum:
    tokens = [(first + place) % 97 for place in range(300)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def send(run: TrainingClient, index: int) -> PinnedBuffer:
    return run.forward_backward(datums(index), "cross_entropy"), run.optim_step(ADAM)


def wait(sent: PinnedBuffer) -> Numbers:
    passed, stepped = sent
    metrics = stepped.result(PATIENCE_S).metrics or {}
    return passed.result(PATIENCE_S).metrics["loss:sum"], metrics["grad_norm"]


def train(run: TrainingClient, indices: Sequence[int]) -> list[Numbers]:
    return [wait(sent) for sent in [send(run, index) for index in indices]]


def copied(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "--archive", source, target], check=True)
    return target


def test_a_copy_of_a_paused_and_of_a_stopped_server_goes_on_with_the_same_numbers(
    tmp_path: Path, base_model: str
) -> None:
    port = [f"--port={free_port()}"]
    first, of_paused, of_stopped = (tmp_path / name for name in ("first", "paused", "stopped"))
    with Serving(first, [base_model], [KEY], port) as serving:
        service = ServiceClient(serving.address, KEY)
        run = service.create_lora_training_client("tiny", rank=4, seed=3)
        seen = train(run, range(3))
        path = run.save_state("kept").result(PATIENCE_S).path
        sent = [send(run, index) for index in range(3, 8)]
        seen.append(wait(sent[0]))
        with paused(serving):
            copied(first, of_paused)
        seen += [wait(each) for each in sent[1:]]
        assert serving.stop() == 0
    copied(first, of_stopped)
    shutil.rmtree(first)
    with Serving(of_stopped, [base_model], [KEY], port), service:
        # The same program, and its next steps.
        undisturbed = train(service.create_lora_training_client("tiny", rank=4, seed=3), range(10))
        assert seen + train(run, range(8, 10)) == undisturbed
    with Serving(of_paused, [base_model], [KEY]) as serving, ServiceClient(serving.address, KEY) as other:
        again = other.create_training_client_from_state_with_optimizer(path)
        assert train(again, range(3, 8)) == undisturbed[3:8]


@contextlib.contextmanager
def paused(serving: Serving) -> Iterator[None]:
    """Hold every process of a server, as `docker compose pause` does."""
    pids = [int(pid) for pid in re.findall(r"started \(pid (\d+)\)", serving.log)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
