"""The ordinary tenants whose waits are measured: one trains, one samples, and one asks `/healthz`.

Each does one thing after another and notes how long each took, from the call to the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import httpx
import numpy as np

from bench.support.model import VOCAB
from bench.support.serving import ADAM, datum
from cotrain import ModelInput, SamplingParams, ServiceClient

#: Tokens of a training step, in sequences of 128, and of a sample.
STEP_TOKENS = 256
SEQUENCE_TOKENS = 128
SAMPLE_TOKENS = 8
#: A health check's own time limit is far above the waits that are promised.
HEALTH_TIMEOUT_S = 120.0
#: Between two health checks, as a load balancer would; the others wait for their results alone.
HEALTH_PAUSE_S = 0.1


class Probe:
    """Does one thing again and again in a thread of its own, and keeps how long each took.

    What has not ended when its waits are read counts with its age, so that a probe that hangs does
    not look like one that was never used.
    """

    def __init__(self, name: str, act: Callable[[], object], pause_s: float = 0.0) -> None:
        self.name = name
        self._act = act
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._waits: list[float] = []
        self._failures: list[str] = []
        self._began: float | None = None
        self._thread = threading.Thread(target=self._repeat, daemon=True, name=name)
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        self._act()  # whatever is made on first use is there
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()

    def take(self) -> tuple[list[float], list[str]]:
        """Return the waits (s) and the failures since the last call."""
        with self._lock:
            waits, self._waits = self._waits, []
            failures, self._failures = self._failures, []
            if self._began is not None and (not waits or time.monotonic() - self._began > 1.0):
                waits.append(time.monotonic() - self._began)
        return waits, failures

    def _repeat(self) -> None:
        while not self._leaving.is_set():
            self._began = time.monotonic()
            try:
                self._act()
            except Exception as error:  # noqa: BLE001 - it is counted and shown
                with self._lock:
                    self._failures.append(f"{type(error).__name__}: {error}"[:200])
                self._leaving.wait(1.0)
            with self._lock:
                self._waits.append(time.monotonic() - self._began)
                self._began = None
            self._leaving.wait(self._pause_s)


def ordinary(address: str, keys: Sequence[str], stack: ExitStack) -> list[Probe]:
    """Start the three of them, each under a key of its own; they run until `stack` is closed."""
    trainer, sampler = (
        stack.enter_context(ServiceClient(base_url=address, api_key=key)) for key in keys
    )
    probes = [
        Probe("training", training_step(trainer)),
        Probe("sampling", sample(sampler)),
        Probe("healthz", health_check(address), HEALTH_PAUSE_S),
    ]
    return [stack.enter_context(probe) for probe in probes]


def training_step(service: ServiceClient) -> Callable[[], object]:
    """Return what submits a step of STEP_TOKENS whole, and waits for it."""
    run = service.create_lora_training_client("bench", rank=8, seed=0)
    rows = STEP_TOKENS // SEQUENCE_TOKENS
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, SEQUENCE_TOKENS + 1)).tolist()
    data = [datum(row) for row in tokens]

    def act() -> object:
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(ADAM)
        return passed.result(), stepped.result()

    return act


def sample(service: ServiceClient) -> Callable[[], object]:
    """Return what asks an adapter for SAMPLE_TOKENS after a short prompt."""
    run = service.create_lora_training_client("bench", rank=8, seed=1)
    sampler = run.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(list(range(1, 17)))
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, seed=0, stop=[])
    return lambda: sampler.sample(prompt, 1, params).result()


def health_check(address: str) -> Callable[[], object]:
    """Return what asks whether the server lives, on a new connection as a checker does."""
    return lambda: httpx.get(f"{address}/healthz", timeout=HEALTH_TIMEOUT_S).raise_for_status()
