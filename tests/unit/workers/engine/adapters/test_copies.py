"""Copies in a stream of their own, and the waits between streams. `tests/gpu` tests real streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cotrain_workers.engine.adapters import copies
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.adapters.copies import CopyStream, carry_in, carry_out
from cotrain_workers.engine.spec import AdapterSpec, Target

CPU = torch.device("cpu")
TARGETS = (Target("q_proj", "attn", 24, 16),)


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")


class FakeEvent:
    def __init__(self, number: int, log: list[str]) -> None:
        self.number = number
        self._log = log

    def record(self, stream: FakeStream) -> None:
        self._log.append(f"copies {self.number} are queued")

    def wait(self) -> None:
        self._log.append(f"compute waits for copies {self.number}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for copies {self.number}")


class FakeCuda:
    """Part of `torch.cuda` that a copy stream uses. It logs every call."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._events = 0

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802  # torch's name
        return FakeStream("side", self.log)

    def Event(self) -> FakeEvent:  # noqa: N802  # torch's name
        self._events += 1
        return FakeEvent(self._events, self.log)

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream("compute", self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append("on the side {")
        yield
        self.log.append("}")


def banked(cuda: Any, runs: str, budget_in_adapters: int) -> AdapterBank:
    other = AdapterBank(TARGETS, CPU, torch.float32)
    size = other.device_bytes(other.create("a", AdapterSpec(4, 0)))
    bank = AdapterBank(
        TARGETS, CPU, torch.float32, adapter_bytes=budget_in_adapters * size, copy_stream=CopyStream(CPU, cuda)
    )
    for seed, run in enumerate(runs):
        bank.create(run, AdapterSpec(4, seed))
    return bank


def test_the_computation_waits_for_a_prefetched_adapter_only_on_use() -> None:
    cuda = FakeCuda()
    bank = banked(cuda, "ab", 1)  # `b` has replaced `a`
    cuda.log.clear()

    bank.prefetch(["a"])
    prefetched = list(cuda.log)
    bank.bring_in(["a"])

    copies = ["side waits for compute", "on the side {"]
    assert prefetched == [*copies, "copies 2 are queued", "}", *copies, "copies 3 are queued", "}"]
    assert cuda.log[len(prefetched) :] == ["compute waits for copies 3"]
    bank.bring_in(["a"])
    assert len(cuda.log) == len(prefetched) + 1


def test_an_adapter_in_use_is_not_offloaded_by_a_prefetch() -> None:
    cuda = FakeCuda()
    bank = banked(cuda, "ab", 1)
    bank.bring_in(["a"])
    cuda.log.clear()

    bank.prefetch(["b"])

    assert cuda.log == []
    bank.release()
    bank.prefetch(["b"])
    assert cuda.log


def test_the_host_waits_for_a_state_only_when_it_reads_it() -> None:
    cuda = FakeCuda()
    bank = banked(cuda, "a", 1)

    copy = bank.copy_out("a")
    assert not [line for line in cuda.log if line.startswith("host")]
    copy.state()
    assert cuda.log[-1] == "host waits for copies 1"

    bank.bring_in(["a"])  # may be written from here on
    assert cuda.log[-1] == "compute waits for copies 1"


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
def test_arenas_are_copied_back_unchanged_in_blocks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BLOCK_BYTES", 64)
    arenas = {"weights": torch.randn(size), "m": torch.randn(size)}

    on_host = carry_out(CopyStream(CPU), arenas)
    back, _ = carry_in(CopyStream(CPU), on_host, CPU)

    assert on_host.bytes == 2 * 4 * size
    assert {len(each) for each in on_host.blocks_by_arena.values()} == {-(-size // 16)}
    for name, arena in arenas.items():
        assert torch.equal(back[name], arena)
        assert torch.equal(on_host.whole()[name], arena)
