"""Adapters between the GPU and pinned host memory, and optimizer steps that the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cotrain_workers.engine.adapters.adapter import Adapter
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, OptimStep
from cotrain_workers.engine.spec import AdapterSpec, Target
from cotrain_workers.engine.training.adamw import Due, adamw_steps, gradient_norms
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
#: 17 M values: an arena of 67 MB, which is one piece of host memory and a rest.
TARGETS = (Target("q_proj", "attn", 4096, 4096), Target("up_proj", "mlp", 4096, 9000))
SPEC = AdapterSpec(800, seed=0)
SIZE = 800 * (4096 + 4096 + 4096 + 9000)
BYTES = SIZE * (4 * 4 + 2)


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def filled(bank: AdapterBank, run: str, value: float) -> Adapter:
    """Add an adapter whose arenas hold different values everywhere."""
    adapter = bank.create(run, SPEC)
    for arena in (adapter.weights, adapter.m, adapter.v):
        value += 1.0
        arena.copy_(torch.arange(SIZE, device=CUDA, dtype=torch.float32).remainder_(1021).add_(value))
    adapter.weights_changed()
    return adapter


def test_offloaded_adapters_come_back_the_same_during_a_computation() -> None:
    bank = AdapterBank(TARGETS, CUDA, torch.bfloat16, adapter_bytes=2 * BYTES)
    for at, run in enumerate("abcd"):
        filled(bank, run, 10.0 * at)
    before = {run: bank.state(run).digest() for run in "abcd"}
    busy = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()

    for runs in ("ab", "cd", "ad", "bc", "ac"):
        with no_host_waits():
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            bank.bring_in(list(runs))
            for run in runs:  # writes right behind the arrival, and takes it back
                bank[run].weights.add_(1.0).sub_(1.0)
            bank.release()
            bank.prefetch(["d", "a"])

    assert bank.offloaded == 2
    assert {run: bank.state(run).digest() for run in "abcd"} == before


def test_idle_adapters_take_no_device_memory() -> None:
    bank = AdapterBank(TARGETS, CUDA, torch.bfloat16, adapter_bytes=2 * BYTES)
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    for at in range(12):
        filled(bank, str(at), float(at))
    torch.cuda.empty_cache()  # counts out what copies have read by now

    assert bank.offloaded == 10
    assert torch.cuda.memory_allocated() - empty <= 2 * BYTES
    on_host = bank["0"].on_host
    assert on_host is not None
    blocks = on_host.blocks_by_arena["weights"]
    assert len(blocks) == 2
    assert all(block.is_pinned() for block in blocks)


def test_a_state_is_copied_out_while_the_device_goes_on() -> None:
    bank = AdapterBank(TARGETS, CUDA, torch.bfloat16)
    adapter = filled(bank, "a", 0.0)
    expected = adapter.weights.cpu()
    torch.cuda.synchronize()

    with no_host_waits():
        copy = bank.copy_out("a")
        bank.bring_in(["a"])
        adapter.weights.zero_()

    assert torch.equal(copy.state().weights, expected)


def test_a_run_is_the_same_to_the_bit_wherever_it_rested(tmp_path: Path) -> None:
    folder = str(build_tiny("qwen3", tmp_path, hidden=128))
    roomy = Engine.load(folder, device="cuda", micro_batch_tokens=1024)
    tight = Engine.load(folder, device="cuda", micro_batch_tokens=1024, adapter_bytes=1)

    for cycle in range(3):
        for at, tenant in enumerate(MIX):
            tight.adapters.prefetch([MIX[at - 1].run])
            for engine in (roomy, tight):
                engine.run(tenant.ops(cycle))

    assert tight.adapters.offloaded >= len(MIX) - 1
    for tenant in MIX:
        assert same_bits(tight.adapters.state(tenant.run), roomy.adapters.state(tenant.run))


def test_the_host_waits_for_the_norms_and_for_nothing_else() -> None:
    together, alone = (AdapterBank(TARGETS, CUDA, torch.bfloat16) for _ in range(2))
    steps = [
        OptimStep(run, 1, lr, 0.9, 0.95, 1e-8, 0.1, clip)
        for run, lr, clip in (("a", 1e-2, 0.5), ("b", 1e-2, 0.0), ("c", 1e-3, 1.0))
    ]
    for bank in (together, alone):
        for at, op in enumerate(steps):
            filled(bank, op.run, float(at)).gradient.flat.fill_(0.1 * (at + 1))
    norms = gradient_norms([together[op.run] for op in steps])

    with no_host_waits():
        adamw_steps([Due(together[op.run], op, n) for op, n in zip(steps, norms, strict=True)])
    for op in steps:
        (norm,) = gradient_norms([alone[op.run]])
        adamw_steps([Due(alone[op.run], op, norm)])

    expected = [0.1 * (at + 1) * SIZE**0.5 for at in range(3)]
    assert norms == pytest.approx(expected, rel=1e-6)
    for op in steps:
        assert together.state(op.run).digest() == alone.state(op.run).digest()


def test_an_engine_knows_what_adapters_may_take(tmp_path: Path) -> None:
    engine = Engine.load(str(build_tiny("qwen3", tmp_path)), device="cuda", micro_batch_tokens=1024)
    assert engine.facts.numerics.adapter_bytes >= 1 << 30
    engine.run([Create("a", 0, AdapterSpec(8, seed=0))])
    assert engine.adapters.offloaded == 0
