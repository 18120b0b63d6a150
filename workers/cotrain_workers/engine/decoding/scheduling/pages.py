"""Allocation of KV-cache pages: holders of each page, and index of prompt prefixes.

A page is shared within one tenant only, so each page in use belongs to one tenant. Plain bookkeeping; the
tensors are in `kv_cache.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


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
        return self._nodes.get(node_key(origin, parent, chunk))

    def insert(self, origin: Origin, parent: Node | None, chunk: bytes, page: int) -> Node | None:
        """Index a complete page and return its node. If the page is already indexed, return that node.

        Return None without indexing if the parent has been dropped.
        """
        if parent is not None and self._nodes.get(parent.key) is not parent:
            return None
        key = node_key(origin, parent, chunk)
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
        for node in [node for node in self._nodes.values() if root(node).weights == weights]:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1
        self._pages.index_holds(node.page, holds=False)
        self._pages.release(node.page)

    def _touch(self, node: Node | None) -> None:
        """Mark a node and its ancestors as the most recently used, parents after their children."""
        for each in lineage(node):
            self._nodes.move_to_end(each.key)


def lineage(node: Node | None) -> Iterator[Node]:
    """Yield a node and its ancestors."""
    while node is not None:
        yield node
        node = node.parent


def root(node: Node) -> Origin:
    """Return the origin of the prompt of a node."""
    *_, first = lineage(node)
    origin = first.key[0]
    assert isinstance(origin, Origin)
    return origin


def node_key(origin: Origin, parent: Node | None, chunk: bytes) -> tuple[object, bytes]:
    """Return the index key of a page, below its parent or at the start of a prompt."""
    return (origin if parent is None else parent, chunk)
