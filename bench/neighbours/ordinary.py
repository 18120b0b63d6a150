"""Ordinary tenants whose waits are measured: one trains, one samples, and one requests `/healthz`.

Each makes one call after another and records its duration from the call to the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import httpx

from bench.support.serving import ADAM, random_data
from cotrain import ModelInput, SamplingParams, ServiceClient

#: Tokens of a training step, of its sequences, and of a sample.
STEP_TOKENS = 256
SEQUENCE_TOKENS = 128
SAMPLE_TOKENS = 8
#: Pause between two health checks in s, as of a load balancer; the other probes have no pause.
HEALTH_PAUSE_S = 0.1


class Probe:
    """Repeats one call in a thread of its own and records its durations.

    A pending call counts with its age when the waits are read. A hanging probe therefore differs from one that was
    never used.
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
        self._act()  # warm-up: creates everything that is created on first use
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
            except Exception as error:  # noqa: BLE001 - it is recorded and shown
                with self._lock:
                    self._failures.append(f"{type(error).__name__}: {error}"[:200])
                self._leaving.wait(1.0)
            with self._lock:
                self._waits.append(time.monotonic() - self._began)
                self._began = None
            self._leaving.wait(self._pause_s)


def ordinary(address: str, keys: Sequence[str], stack: ExitStack) -> list[Probe]:
    """Start the three probes, the tenants under a key each; they run until `stack` is closed."""
    trainer, sampler = (stack.enter_context(ServiceClient(base_url=address, api_key=key)) for key in keys)
    probes = [
        Probe("training", training_step(trainer)),
        Probe("sampling", sample(sampler)),
        Probe("healthz", lambda: is_healthy(address), HEALTH_PAUSE_S),
    ]
    return [stack.enter_context(probe) for probe in probes]


def training_step(service: ServiceClient) -> Callable[[], object]:
    """Return a call that submits a step of STEP_TOKENS and waits for its results."""
    run = service.create_lora_training_client("bench", rank=8, seed=0)
    data = random_data(STEP_TOKENS // SEQUENCE_TOKENS, SEQUENCE_TOKENS, seed=0)

    def act() -> object:
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(ADAM)
        return passed.result(), stepped.result()

    return act


def sample(service: ServiceClient) -> Callable[[], object]:
    """Return a call that samples SAMPLE_TOKENS from an adapter after a short prompt."""
    run = service.create_lora_training_client("bench", rank=8, seed=1)
    sampler = run.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(list(range(1, 17)))
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, seed=0, stop=[])
    return lambda: sampler.sample(prompt, 1, params).result()


def is_healthy(address: str) -> None:
    """Check the server's health on a new connection, like a load balancer; raise for an error."""
    httpx.get(f"{address}/healthz", timeout=120.0).raise_for_status()
