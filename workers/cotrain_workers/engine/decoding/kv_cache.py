"""KV cache of the decoder: memory of its pages, allocated once, their holders, and default sizes.

A page is shared within one tenant only, so each page in use belongs to one tenant. The bookkeeping (`Pages`,
`PrefixIndex`) holds no keys or values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.model.linear_attention import StateShape

CPU_TOKENS = 65_536
CPU_BYTES = 2 * 1024**3
# Share of the free memory when the decoder is created, sampler weights included; training needs the rest.
CUDA_SHARE = 0.25
PAGE_TOKENS = {"cpu": 64, "cuda": 256}
MOST_PAGE_TOKENS = {"cpu": 64, "cuda": 2048}  # a page is also the least part of a prompt in a step
MAX_SEQUENCES = 256  # running at once per tenant
STEP_TOKENS = {"cpu": 512, "cuda": 4096}  # prompt tokens per step: bounds the activations
# Rows and prompt tokens of a step of several tenants: takes about twice as long as a single row (ADR 23).
SHARED_STEP_TOKENS = {"cpu": 48, "cuda": 512}


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


class Pages:
    """Reference counts of `count` pages; a page without holders is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.idle = 0  # pages held only by the prefix index, which can be evicted at any time
        self.used: Counter[str] = Counter()  # pages held by sequences, by tenant
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._is_indexed = [False] * count
        self._tenants = [""] * count

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, tenant: str) -> int | None:
        """Return a free page with one holder, or None."""
        if not self._free:
            return None
        page = self._free.pop()
        self._tenants[page] = tenant
        self._holders[page] = 1
        self._count(page, 1)
        return page

    def hold(self, page: int) -> None:
        """Add a holder."""
        assert self._holders[page] > 0
        self._count(page, -1)
        self._holders[page] += 1
        self._count(page, 1)

    def release(self, page: int) -> None:
        """Remove a holder; the last one frees the page."""
        assert self._holders[page] > 0
        self._count(page, -1)
        self._holders[page] -= 1
        self._count(page, 1)
        if self._holders[page] == 0:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Return True if a write to a page would affect another holder."""
        return self._holders[page] > 1

    def is_available_without(self, page: int) -> bool:
        """Return True if exactly one sequence holds a page, so its release makes the page available."""
        return self._sequences(page) == 1

    def index_holds(self, page: int, *, holds: bool) -> None:
        """Record if the prefix index is among the holders; it holds a page at most once."""
        self._count(page, -1)
        self._is_indexed[page] = holds
        self._count(page, 1)

    def _sequences(self, page: int) -> int:
        return self._holders[page] - self._is_indexed[page]

    def _count(self, page: int, more: int) -> None:
        if self._sequences(page):
            self.used[self._tenants[page]] += more
        elif self._is_indexed[page]:
            self.idle += more


class Origin(NamedTuple):
    """Scope in which the first page of a prompt is shared."""

    weights: str | None
    tenant: str


@dataclass(eq=False)
class Node:
    """Stored page of a prompt: the tokens of this page, after those of its ancestors."""

    page: int
    parent: Node | None
    key: tuple[object, bytes]
    children: int = 0
    # Hidden state of the last token, float `[d]`; set if some prompt ended here.
    last_hidden: torch.Tensor | None = None
    experts: np.ndarray | None = None  # of its tokens, int16 [tokens, layers, k]


class PrefixIndex:
    """Index of stored pages by weights, tenant and all tokens up to their end; it holds each page once.

    Keys are the tokens themselves, not hashes, so a collision cannot return another prompt's page.
    A holder of a node's page also holds the pages of its ancestors.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._nodes: OrderedDict[tuple[object, bytes], Node] = OrderedDict()  # LRU order

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, origin: Origin, chunks: Sequence[bytes]) -> list[Node]:
        """Return the nodes of the longest indexed prefix of a prompt, given as pages."""
        found: list[Node] = []
        for chunk in chunks:
            node = self.find(origin, found[-1] if found else None, chunk)
            if node is None:
                break
            found.append(node)
        self._touch(found[-1] if found else None)
        return found

    def find(self, origin: Origin, parent: Node | None, chunk: bytes) -> Node | None:
        """Return the node of one page, or None."""
        return self._nodes.get(_node_key(origin, parent, chunk))

    def insert(self, origin: Origin, parent: Node | None, chunk: bytes, page: int) -> Node | None:
        """Index a complete page and return its node. If the page is already indexed, return that node.

        Return None without indexing if the parent has been dropped.
        """
        if parent is not None and self._nodes.get(parent.key) is not parent:
            return None
        key = _node_key(origin, parent, chunk)
        known = self._nodes.get(key)
        if known is not None:
            return known
        self._pages.hold(page)
        self._pages.index_holds(page, holds=True)
        node = Node(page, parent, key)
        if parent is not None:
            parent.children += 1
        self._nodes[key] = node
        self._touch(node)
        return node

    def evict(self) -> bool:
        """Free the least recently used page that no sequence holds; return False if there is none."""
        for node in self._nodes.values():
            if not node.children and not self._pages.is_shared(node.page):
                self._remove(node)
                return True
        return False

    def drop(self, weights: str | None) -> None:
        """Drop the prompts of weights that no later request uses."""
        # A parent is touched after its children, so in LRU order every child precedes its parent.
        for node in [node for node in self._nodes.values() if _root(node).weights == weights]:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1
        self._pages.index_holds(node.page, holds=False)
        self._pages.release(node.page)

    def _touch(self, node: Node | None) -> None:
        """Mark a node and its ancestors as the most recently used, parents after their children."""
        for each in _lineage(node):
            self._nodes.move_to_end(each.key)


def _lineage(node: Node | None) -> Iterator[Node]:
    """Yield a node and its ancestors."""
    while node is not None:
        yield node
        node = node.parent


def _root(node: Node) -> Origin:
    """Return the origin of the prompt of a node."""
    *_, first = _lineage(node)
    origin = first.key[0]
    assert isinstance(origin, Origin)
    return origin


def _node_key(origin: Origin, parent: Node | None, chunk: bytes) -> tuple[object, bytes]:
    """Return the index key of a page, below its parent or at the start of a prompt."""
    return (origin if parent is None else parent, chunk)


@dataclass(frozen=True)
class DecoderSizes:
    """Memory and work limits of a decoder; None selects the default of the device."""

    kv_tokens: int | None
    page_tokens: int | None
    step_tokens: int | None
    weights_bytes: int | None
    head_chunk_rows: int


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


def sampler_bytes(default: int, share: int | None) -> int:
    """Return the memory limit of sampler weights in bytes: on a GPU at most a quarter of the decoder's share.

    `default` applies where no share is set.
    """
    return default if share is None else min(default, share // 4)
