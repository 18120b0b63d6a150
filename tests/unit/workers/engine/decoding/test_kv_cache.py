from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.engine.decoding.kv_cache import (
    Node,
    Origin,
    Pages,
    PrefixIndex,
    affordable_tokens,
    default_page_tokens,
)
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.model.linear_attention import StateShape

W = Origin("w", "t")
CHUNKS = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=4)


def stored(pages: Pages, index: PrefixIndex, weights: str | None, chunks: list[bytes]) -> list[int]:
    """Compute a prompt as a sequence does: share indexed pages and index the rest. Return its pages."""
    nodes = index.match(Origin(weights, "t"), chunks)
    for node in nodes:
        pages.hold(node.page)
    own_pages = [node.page for node in nodes]
    parent = nodes[-1] if nodes else None
    for chunk in chunks[len(nodes) :]:
        page = pages.take("t")
        while page is None and index.evict():
            page = pages.take("t")
        if page is None:
            break
        parent = index.insert(Origin(weights, "t"), parent, chunk, page)
        own_pages.append(page)
    return own_pages


def test_a_page_is_free_when_its_last_holder_releases_it() -> None:
    pages = Pages(2)
    page = pages.take("t")
    assert page is not None
    pages.hold(page)
    assert pages.is_shared(page)

    pages.release(page)
    assert pages.free == 1
    pages.release(page)

    assert pages.free == 2


def test_no_page_is_taken_when_none_is_free() -> None:
    pages = Pages(1)
    assert pages.take("t") == 0

    assert pages.take("t") is None


def test_the_indexed_prefix_of_a_prompt_is_found() -> None:
    pages = Pages(8)
    index = PrefixIndex(pages)
    own_pages = stored(pages, index, "w", [b"a", b"b", b"c"])

    assert [node.page for node in index.match(W, [b"a", b"b", b"x", b"c"])] == own_pages[:2]
    assert index.match(Origin("other", "t"), [b"a"]) == []
    assert index.match(Origin(None, "t"), [b"a"]) == []
    assert index.match(Origin("w", "another"), [b"a"]) == []
    assert index.match(W, [b"b"]) == []


def test_only_unused_pages_are_evicted_with_the_oldest_first() -> None:
    pages = Pages(4)
    index = PrefixIndex(pages)
    in_use = stored(pages, index, "w", [b"a"])
    for page in stored(pages, index, "old", [b"a", b"b"]):
        pages.release(page)
    for page in stored(pages, index, "new", [b"a"]):
        pages.release(page)

    assert index.evict()
    assert len(index.match(Origin("old", "t"), [b"a", b"b"])) == 1  # the end of a prompt goes before its beginning
    index.match(Origin("new", "t"), [b"a"])
    assert index.evict()
    assert index.match(Origin("old", "t"), [b"a"]) == []
    assert index.evict()
    assert not index.evict()
    assert [node.page for node in index.match(W, [b"a"])] == in_use


def test_a_page_computed_twice_is_indexed_once() -> None:
    pages = Pages(4)
    index = PrefixIndex(pages)
    first, second = pages.take("t"), pages.take("t")
    assert first is not None
    assert second is not None

    known = index.insert(W, None, b"a", first)

    assert index.insert(W, None, b"a", second) is known
    assert len(index) == 1


def test_no_page_is_indexed_below_a_dropped_one() -> None:
    pages = Pages(4)
    index = PrefixIndex(pages)
    own_pages = stored(pages, index, "w", [b"a"])
    parent = index.find(W, None, b"a")
    index.drop("w")
    page = pages.take("t")
    assert page is not None

    assert index.insert(W, parent, b"b", page) is None

    for each in (*own_pages, page):
        pages.release(each)
    assert pages.free == 4


@given(
    st.lists(st.tuples(st.sampled_from(["one", "two", None]), CHUNKS, st.booleans()), max_size=40), st.integers(1, 6)
)
def test_pages_are_never_lost_and_never_shared_by_accident(
    prompts: list[tuple[str | None, list[bytes], bool]], count: int
) -> None:
    pages = Pages(count)
    index = PrefixIndex(pages)
    running: list[list[int]] = []
    for weights, chunks, drops in prompts:
        own_pages = stored(pages, index, weights, chunks)
        running.append(own_pages)
        if len(running) > 2:
            for page in running.pop(0):
                pages.release(page)
        if drops:
            index.drop(weights)
        in_use = {page for own_pages in running for page in own_pages}
        assert pages.free + pages.idle + len(in_use) == count
        for node in list(index._nodes.values()):
            check_parents(index, node)
    for own_pages in running:
        for page in own_pages:
            pages.release(page)
    assert pages.free + pages.idle == count
    while index.evict():
        pass
    assert pages.free == count


def check_parents(index: PrefixIndex, node: Node) -> None:
    """Check that a page in the index is reachable: all pages before it are in the index too."""
    while node.parent is not None:
        assert index._nodes[node.parent.key] is node.parent
        node = node.parent


def test_a_shared_page_in_use_is_counted_once_for_its_tenant() -> None:
    pages = Pages(4)
    index = PrefixIndex(pages)
    page = pages.take("t")
    assert page is not None
    pages.take("other")
    index.insert(W, None, b"a", page)
    pages.hold(page)
    assert (pages.used["t"], pages.used["other"], pages.idle) == (1, 1, 0)
    assert not pages.is_available_without(page)

    pages.release(page)
    assert pages.is_available_without(page)
    pages.release(page)

    assert (pages.used["t"], pages.idle) == (0, 1)
    assert index.evict()
    assert (pages.used["t"], pages.idle, pages.free) == (0, 0, 3)


def test_pages_grow_with_their_states() -> None:
    """The numbers of Qwen3-Next-80B-A3B: 36 states, and keys and values in 12 layers."""
    shape, dtype = KvShape(12, 2, 256), torch.bfloat16
    state_bytes = 36 * StateShape((3, 8192), (32, 128, 128)).sizes(dtype.itemsize)

    assert state_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert default_page_tokens(shape, dtype, "cuda", state_bytes) == 2048
    assert default_page_tokens(shape, dtype, "cuda", 0) == 256
    assert default_page_tokens(shape, dtype, "cpu", state_bytes) == 64
    tokens = affordable_tokens(shape, 4096, dtype, 10 * 1024**3, state_bytes, 2048)
    assert tokens // 2048 * (2048 * shape.values * 2 + state_bytes) <= 10 * 1024**3
    assert affordable_tokens(shape, 4096, dtype, 10 * 1024**3, 0, 256) > 2 * tokens
