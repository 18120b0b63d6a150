"""Copies of adapters between the device and the host's memory.

On CUDA they run concurrently with the computation, in a second stream.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch

from cotrain_workers.engine.ops import HostOptimizer, HostWeights
from cotrain_workers.engine.spec import AdapterSpec

#: Size of a block of host memory. PyTorch rounds each pinned block up to a power of two, which in
#: one block would cost a 174 MB arena (Qwen3-8B, rank 16) 256 MB.
BLOCK_BYTES = 1 << 26
#: Arena of the gradient of a pass that may stay open. It moves with the others, but is not part of the run's state.
OPEN_GRADIENT = "open"

#: Event after some copies: `wait` makes later computation wait for them, `synchronize` blocks the host.
Arrival: TypeAlias = torch.cuda.Event | torch.cpu.Event


class CopyStream:
    """Copies in a CUDA stream of their own, in their order.

    On a CPU the streams of torch do nothing, and copies run at once.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        """`streams` stands for `torch.cuda` in a test without a GPU."""
        self.pins = device.type == "cuda"  # host memory must be pinned for the copies
        self._device = device
        self._streams = streams or torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    @contextmanager
    def copies(self) -> Iterator[Arrival]:
        """Order the copies inside after all computation so far."""
        arrival = self._streams.Event()
        # Pending kernels may still use memory that was just released.
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield arrival
            arrival.record(self._stream)

    def lend(self, arena: torch.Tensor) -> None:
        """Keep the memory of a released arena until its copies are complete."""
        if arena.is_cuda:
            arena.record_stream(self._stream)


@dataclass(frozen=True)
class HostArenas:
    """Arenas in host memory, in blocks; complete at `arrival`. Read-only."""

    blocks_by_arena: Mapping[str, tuple[torch.Tensor, ...]]
    arrival: Arrival

    @property
    def bytes(self) -> int:
        """Size of all arenas."""
        blocks = (block for each in self.blocks_by_arena.values() for block in each)
        return sum(block.nbytes for block in blocks)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the arenas in one read-only block each. Blocks until they have arrived."""
        self.arrival.synchronize()
        return {
            name: blocks[0] if len(blocks) == 1 else torch.cat(blocks) for name, blocks in self.blocks_by_arena.items()
        }


def carry_out(stream: CopyStream, arenas: Mapping[str, torch.Tensor]) -> HostArenas:
    """Start a copy of arenas to the host. They may be released at once, but not written to."""
    blocks_by_arena = {}
    with stream.copies() as arrival:
        for name, arena in arenas.items():
            stream.lend(arena)
            parts = torch.split(arena, BLOCK_BYTES // arena.element_size())
            blocks_by_arena[name] = tuple(
                torch.empty(len(part), dtype=part.dtype, pin_memory=stream.pins).copy_(part, non_blocking=True)
                for part in parts
            )
    return HostArenas(blocks_by_arena, arrival)


def carry_in(stream: CopyStream, on_host: HostArenas, device: torch.device) -> tuple[dict[str, torch.Tensor], Arrival]:
    """Start a copy of arenas to the device; they may be used after the arrival."""
    arenas = {
        # Allocate in the computation's stream: memory of another stream could not be reused for anything else.
        name: torch.empty(sum(map(len, blocks)), dtype=blocks[0].dtype, device=device)
        for name, blocks in on_host.blocks_by_arena.items()
    }
    with stream.copies() as arrival:
        for name, blocks in on_host.blocks_by_arena.items():
            stream.lend(arenas[name])
            parts = torch.split(arenas[name], len(blocks[0]))
            for part, block in zip(parts, blocks, strict=True):
                part.copy_(block, non_blocking=True)
    return arenas, arrival


@dataclass(frozen=True)
class AdapterState:
    """A run's adapter, copied to the host. The four tensors are 1-D, of one length, in arena layout."""

    spec: AdapterSpec
    weights: torch.Tensor
    grads: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: int  # optimizer steps taken
    grads_pending: bool  # a gradient waits for the next optimizer step

    @classmethod
    def of(cls, spec: AdapterSpec, weights: HostWeights, moments: HostOptimizer | None) -> Self:
        """Return the state of a checkpoint, without a pending gradient; zero moments if it has none."""
        zeros, flat = torch.zeros_like(weights.flat), weights.flat
        if moments is None:
            return cls(spec, flat, zeros, zeros, zeros, 0, grads_pending=False)
        return cls(spec, flat, zeros, moments.m, moments.v, moments.step, grads_pending=False)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the whole state; equal digests mean equal bits."""
        hasher = hashlib.sha256(repr((self.spec, self.step, self.grads_pending)).encode())
        for arena in (self.weights, self.grads, self.m, self.v):
            hasher.update(arena.contiguous().numpy().data)
        return hasher.hexdigest()


@dataclass(frozen=True)
class StateCopy:
    """Copy of a run's state on its way to the host."""

    spec: AdapterSpec
    step: int
    grads_pending: bool
    arenas: HostArenas

    def state(self) -> AdapterState:
        """Return the state once it has arrived; any thread may wait for it."""
        arenas = self.arenas.whole()
        arenas.pop(OPEN_GRADIENT, None)  # an offloaded adapter has it, but it is not state
        grads = arenas.pop("grads", None)
        return AdapterState(
            self.spec,
            grads=torch.zeros_like(arenas["weights"]) if grads is None else grads,
            step=self.step,
            grads_pending=self.grads_pending,
            **arenas,
        )
