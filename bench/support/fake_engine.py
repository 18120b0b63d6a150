"""Engine with a model of a few layers, on a CUDA device with shapes but without values."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.support.model import Shape, config_of
from bench.support.record import Args
from cotrain_workers.engine.adapters import bank
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora import backend
from cotrain_workers.engine.lora.fused import tables
from cotrain_workers.engine.lora.fused.operators import SILU
from cotrain_workers.engine.model import (
    attention,
    base_model,
    experts,
    fused_layers,
    kernel_check,
    layer_kernels,
)
from cotrain_workers.engine.ops import Create, Datum, Pass
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training import adamw, memory_model, pass_state
from tests.support import fake_cuda

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16


class FakeEngine:
    """Engine with a model of a given shape and few layers, and counts of its host reads."""

    def __init__(self, shape: Shape, layers: int, settings: Args, *, recomputes: bool = False) -> None:
        self.reads: Counter[str] = Counter()
        self.log = fake_cuda.LaunchLog()
        config = config_of(replace(shape, layers=layers))
        self._config, self._settings, self._recomputes = config, settings, recomputes

    def load(self) -> Engine:
        """Return the engine; call it on the fake device, with `played` patched in."""
        settings = self._settings
        return Engine.load(
            "fake", device="cuda:0", dtype=BF16, micro_batch_tokens=max(settings.tenants * settings.length, 256),
            recompute="always" if self._recomputes else "never", lora_backend=settings.backend,
            adapter_bytes=60_000_000_000, quantization=getattr(settings, "quantization", "none"),
        )  # fmt: skip

    def played(self) -> dict[Any, dict[str, Any]]:
        """Return replacements, by module, of functions that need values or kernels."""

        def build(*_: Any, **__: Any) -> Any:
            with torch.device(DEVICE):
                network = AutoModelForCausalLM.from_config(self._config, dtype=BF16)
            network.to = lambda _: network
            return network

        def values(passes: Sequence[Any]) -> list[np.ndarray]:
            self.reads["values of the passes"] += bool(passes)
            sizes = [sum(int(np.prod(d.shape)) for d in each.op.datums) for each in passes]
            return [np.concatenate([[0.0, 1.0], np.zeros(size)]) for size in sizes]

        def norms(adapters: Sequence[Any]) -> list[float]:
            self.reads["norms of the gradients"] += bool(adapters)
            return [1.0] * len(adapters)

        def balanced(index: torch.Tensor) -> np.ndarray:
            # Each expert has equally many tokens, so all experts of a layer run.
            self.reads["experts of the layers"] += 1
            index.cpu()  # for the log
            count: int = self._config.num_experts
            return (np.arange(index.numel()) % count).reshape(index.shape)

        return {
            experts: {"choices_on_host": balanced, "gate_of": lambda _: SILU},
            base_model: {
                **dict.fromkeys(("refuse_not_finite", "refuse_failing", "refuse_too_large"), lambda _: None),
                "read_config": lambda *_, **__: self._config, "read_weights": build,
            },
            backend: {"disagreement": lambda *_, **__: None, "missing_kernels": lambda _: None},
            kernel_check: {"disagreement": lambda *_, **__: None},
            tables: {"address_of": lambda *_: 0},
            Slot: {"address": 0},
            attention: {"varlen_is_right": lambda *_: True},
            fused_layers: {
                "first_equal": lambda candidates, *_: candidates[0],
                "is_right": lambda *_: True, "missing_kernels": lambda _: None,
            },
            layer_kernels: {"disagreement": lambda *_: 0.0},
            pass_state: {"values_on_host": values},
            adamw: {"gradient_norms": norms},
            memory_model: {"probe": lambda *_, **__: True},
            bank: {"initial_weights": lambda _, layout: torch.empty(layout.size)},
        }  # fmt: skip


def begin(engine: Engine, fake: FakeEngine, runs: Sequence[str], rank: int) -> None:
    """Create runs with gradients, as from the second cycle on, and clear the counts."""
    engine.run([Create(run, 0, AdapterSpec(rank, seed=0)) for run in runs])
    for run in runs:
        _ = engine.adapters[run].gradient
    fake.reads.clear()
    fake.log.launches.clear()


def a_pass(run: str, length: int) -> Pass:
    """Return a forward_backward of one datum."""
    ids = np.zeros(length, np.int64)
    datum = Datum(ids, {"target_tokens": ids, "weights": np.ones(length, np.float32)})
    return Pass(run, 1, [datum], "cross_entropy", {}, True)


def run_on_fake_cuda(count: Callable[[], None]) -> int:
    """Count in a process of its own with the device preloaded; return its exit status."""
    if "fake-cuda" in os.environ.get("LD_PRELOAD", ""):
        count()
        return 0
    ran = fake_cuda.preloaded("bench", sys.argv[1:])
    print(ran.stdout, end="")
    print(ran.stderr, end="", file=sys.stderr)
    return ran.returncode


def on_fake_device(fake: FakeEngine, work: Callable[[Engine], None]) -> None:
    """Load an engine on the fake device and pass it to `work`."""
    with fake_cuda.fake_cuda(), ExitStack() as patches:
        for module, values in fake.played().items():
            patches.enter_context(mock.patch.multiple(module, **values))
        work(fake.load())
