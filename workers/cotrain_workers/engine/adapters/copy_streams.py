"""Copies of arenas between the device and the host's memory.

On CUDA they run concurrently with the computation, in a second stream.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

#: Size of a block of host memory. PyTorch rounds each pinned block up to a power of two, which in
#: one block would cost a 174 MB arena (Qwen3-8B, rank 16) 256 MB.
BLOCK_BYTES = 1 << 26


#: Event after some copies: `wait` makes later computation wait for them, `synchronize` blocks the host.
Arrival: TypeAlias = torch.cuda.Event | torch.cpu.Event


class CopyStream:
    """Copies in a CUDA stream of their own, in their order. On a CPU the streams of torch do nothing, and copies run at once."""

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
        # Allocate in the computation's stream: memory of another stream could not be reused for
        # anything else.
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
