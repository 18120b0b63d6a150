"""KV cache of the decoder: pages of every layer, allocated once; and its default sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.model.base_model import KvShape
from cotrain_workers.engine.model.linear_attention import StateShape

CPU_TOKENS = 65_536
CPU_BYTES = 2 * 1024**3
# Share of the free memory when the decoder is created, sampler weights included; training needs the rest.
CUDA_SHARE = 0.25
PAGE_TOKENS = {"cpu": 64, "cuda": 256}
MOST_PAGE_TOKENS = {"cpu": 64, "cuda": 2048}  # a page is also the least part of a prompt in a step


class KvCache:
    """Keys and values of `pages` pages, and one dump page for rows without a sequence."""

    def __init__(
        self,
        shape: KvShape,
        pages: int,
        page_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        states: Sequence[StateShape] = (),
    ) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self.dump = pages
        sizes = [((pages + 1) * page_tokens, *shape.of(layer)) for layer in range(shape.layers)]
        # [positions, kv heads, head dim]; a page is `page_tokens` adjacent positions
        self._keys, self._values = ([torch.empty(size, device=device, dtype=dtype) for size in sizes] for _ in range(2))
        for memory in (*self._keys, *self._values):  # other pages are zeroed before their first use
            memory[pages * page_tokens :] = 0
        #: Inputs of the convolution and matrices of each layer with a state, `[pages + 1, ...]`. Those of the
        #: dump page stay zero: a sequence begins with them.
        self.states = [
            (
                torch.zeros(pages + 1, *each.inputs, device=device, dtype=dtype),
                torch.zeros(pages + 1, *each.matrices, device=device),
            )
            for each in states
        ]

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self._keys[0].dtype

    def paged(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values `[pages + 1, page_tokens, kv heads, head dim]`."""
        shape = (self.pages + 1, self.page_tokens, *self._keys[layer].shape[1:])
        return self._keys[layer].view(shape), self._values[layer].view(shape)

    def write(self, layer: int, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `n` rows `[n, kv heads, head dim]` at `kv_slots`, int64 `[n]`: page * page_tokens + offset."""
        with unordered_writes():
            self._keys[layer].index_copy_(0, kv_slots, keys)
            self._values[layer].index_copy_(0, kv_slots, values)

    def gather(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of `m` page tables `[m, c]`, `[m, kv heads, c * page_tokens, head dim]`."""
        rows, pages = table.shape
        found = []
        for memory in self.paged(layer):
            picked = memory.flatten(1).index_select(0, table.flatten())
            found.append(picked.view(rows, pages * self.page_tokens, *memory.shape[2:]))
        keys, values = (x.transpose(1, 2) for x in found)
        return keys, values

    def prepare(self, copies: Mapping[int, int], blank: Sequence[int]) -> None:
        """Copy pages (page to write -> page to read), then zero the blank ones.

        Attention multiplies masked values by zero, so a stale NaN would reach the result.
        """
        if not copies and not blank:
            return
        to, of, empty = (
            to_device(torch.tensor(list(pages), dtype=torch.int64), self.device)
            for pages in (copies.keys(), copies.values(), blank)
        )
        every = [memory for layer in range(len(self._keys)) for memory in self.paged(layer)]
        states = [memory for layer in self.states for memory in layer]
        with unordered_writes():
            for memory in every:
                if copies:
                    memory.index_copy_(0, to, memory.index_select(0, of))
                if blank:
                    memory.index_fill_(0, empty, 0)
            for memory in states if copies else ():  # never read before they are written
                memory.index_copy_(0, to, memory.index_select(0, of))


def default_page_tokens(shape: KvShape, dtype: torch.dtype, device: str, state_bytes: int) -> int:
    """Return the default size of a page.

    On a GPU, pages grow until their keys and values take as much memory as their states.
    """
    tokens, most = PAGE_TOKENS[device], MOST_PAGE_TOKENS[device]
    while tokens < most and tokens * shape.values * dtype.itemsize < state_bytes:
        tokens *= 2
    return tokens


def decoder_share(device: torch.device) -> int | None:
    """Return the GPU bytes for keys, values and sampler weights together; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_SHARE)


def affordable_tokens(
    shape: KvShape, context_length: int, dtype: torch.dtype, free_bytes: int | None, state_bytes: int, page_tokens: int
) -> int:
    """Return the default number of KV-cache tokens: what fits in `free_bytes`, or a few sequences on a CPU.

    Each page of `page_tokens` has `state_bytes` besides its keys and values.
    """
    token_bytes = shape.values * dtype.itemsize + -(-state_bytes // page_tokens)
    if free_bytes is not None:
        return free_bytes // token_bytes
    wanted = max(CPU_TOKENS, context_length + PAGE_TOKENS["cpu"])
    return min(wanted, CPU_BYTES // token_bytes)


MAX_SEQUENCES = 256  # running at once per tenant


STEP_TOKENS = {"cpu": 512, "cuda": 4096}  # prompt tokens per step: bounds the activations
# Rows and prompt tokens of a step of several tenants: takes about twice as long as a single row (ADR 23).
SHARED_STEP_TOKENS = {"cpu": 48, "cuda": 512}


@dataclass(frozen=True)
class DecoderSizes:
    """Memory and work limits of a decoder; None selects the default of the device."""

    kv_tokens: int | None
    page_tokens: int | None
    step_tokens: int | None
    weights_bytes: int | None
    head_chunk_rows: int


def sampler_bytes(default: int, share: int | None) -> int:
    """Return the memory limit of sampler weights in bytes: on a GPU at most a quarter of the decoder's share.

    `default` applies where no share is set.
    """
    return default if share is None else min(default, share // 4)
