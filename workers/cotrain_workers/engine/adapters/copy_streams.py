"""Copies of arenas between the device and the host's memory.

On CUDA they run concurrently with the computation, in a second stream.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: Size of a block of host memory. PyTorch rounds each pinned block up to a power of two, which in
#: one block would cost a 174 MB arena (Qwen3-8B, rank 16) 256 MB.
BLOCK_BYTES = 1 << 26


class Arrival(Protocol):
    """Completion of some copies."""

    def hold_compute(self) -> None:
        """Make later computation wait for the copies; the host continues."""

    def wait(self) -> None:
        """Block the host until the copies are complete."""


class CopyStream(Protocol):
    """Stream of copies."""

    pins: bool  # True if host memory must be pinned for the copies

    def copies(self) -> AbstractContextManager[Arrival]:
        """Order the copies inside after all computation so far."""

    def lend(self, arena: torch.Tensor) -> None:
        """Keep the memory of a released arena until its copies are complete."""


class Made:
    """Arrival of copies that were complete when they returned."""

    def hold_compute(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""


class InLine:
    """Copies in the stream of the computation, which on CPU is the program itself."""

    pins = False

    @contextmanager
    def copies(self) -> Iterator[Arrival]:
        """Yield at once: the copies inside run in order."""
        yield Made()

    def lend(self, arena: torch.Tensor) -> None:
        """Do nothing: the arena is copied at once."""


class Recorded:
    """CUDA event after some copies."""

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda = cuda
        self._device = device
        self._event = cuda.Event()

    def record(self, stream: Any) -> None:
        """Record the event after everything in the stream so far."""
        self._event.record(stream)

    def hold_compute(self) -> None:
        """Make the stream of the computation wait for the event."""
        self._cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """Block the host until the event."""
        self._event.synchronize()


class SideStream:
    """Copies in a CUDA stream of their own. Copies in both directions keep their order."""

    pins = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda` stands for `torch.cuda` in a test without a GPU."""
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    @contextmanager
    def copies(self) -> Iterator[Arrival]:
        """Order the copies after all computation so far, in the side stream."""
        arrival = Recorded(self._cuda, self._device)
        # Pending kernels may still use memory that was just released.
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            yield arrival
            arrival.record(self._stream)

    def lend(self, arena: torch.Tensor) -> None:
        """Keep its memory until the side stream has finished with it."""
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
        self.arrival.wait()
        return {
            name: blocks[0] if len(blocks) == 1 else torch.cat(blocks)
            for name, blocks in self.blocks_by_arena.items()
        }


def carry_out(stream: CopyStream, arenas: Mapping[str, torch.Tensor]) -> HostArenas:
    """Start a copy of arenas to the host. They may be released at once, but not written to."""
    blocks_by_arena = {}
    with stream.copies() as arrival:
        for name, arena in arenas.items():
            stream.lend(arena)
            parts = torch.split(arena, BLOCK_BYTES // arena.element_size())
            blocks_by_arena[name] = tuple(
                torch.empty(len(part), dtype=part.dtype, pin_memory=stream.pins).copy_(
                    part, non_blocking=True
                )
                for part in parts
            )
    return HostArenas(blocks_by_arena, arrival)


def carry_in(
    stream: CopyStream, on_host: HostArenas, device: torch.device
) -> tuple[dict[str, torch.Tensor], Arrival]:
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
