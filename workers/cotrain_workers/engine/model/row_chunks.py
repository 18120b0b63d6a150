"""MLPs in chunks of rows, for a datum whose MLP would not fit into memory as a whole.

The inner values of a layer take several times as much memory as its input. In backward each chunk computes its inner values
again. A row has the same bits in every chunk of 32 rows or more. LoRA's gradients are sums over chunks instead of one sum over
all rows, so their last bits differ from those of the whole MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cotrain_workers.engine.routing import Route, Router

#: Rows of a chunk. Reading the weights of an 8B model takes 5 % of its time on an H200.
CHUNK_ROWS = 2048
#: Modules of a layer that compute each row alone, by their name in the models of transformers.
ROW_MODULES = ("mlp", "block_sparse_moe", "feed_forward")


def attach(layers: Iterable[nn.Module], router: Router) -> None:
    """Make the MLP of each layer compute in chunks where the route has them."""
    for layer in layers:
        for name in ROW_MODULES:
            module: Any = getattr(layer, name, None)
            if module is not None:
                module.forward = _in_chunks(router, module.forward)


def _in_chunks(router: Router, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return by_rows(router, x, lambda rows: forward(rows, *args, **kwargs))

    return run


def by_rows(router: Router, x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return `function(x)` for `x` `[1, T, d]`, chunk by chunk if the route has chunks.

    Of a tuple, all values but the first become None. They are scores of a router, which nothing reads.
    """
    chunks = None if router.step is not None else router.route.chunks
    if chunks is None or x.dim() != 3 or x.shape[1] <= chunks.rows:
        return function(x)
    found = [
        _chunk(router, part_of(router.route, start, start + part.shape[1]), part, function)
        for start, part in zip(range(0, x.shape[1], chunks.rows), x.split(chunks.rows, dim=1), strict=True)
    ]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found, dim=1)
    return torch.cat([each[0] for each in found], dim=1), *[None] * (len(found[0]) - 1)


def _chunk(router: Router, route: Route, x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
    def run(rows: torch.Tensor) -> Any:
        with router.use(route):
            return function(rows)

    if not torch.is_grad_enabled():
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def part_of(route: Route, start: int, stop: int) -> Route:
    """Return the route of rows `start` to `stop`, for modules that compute each row alone."""
    assert route.chunks is not None
    segments = [
        replace(each, start=max(each.start, start) - start, stop=min(each.stop, stop) - start)
        for each in route.segments
        if each.start < stop and each.stop > start
    ]
    experts = None if route.experts is None else route.experts[:, start:stop]
    lora = route.chunks.lora_of(segments, stop - start)
    return replace(route, segments=segments, lora=lora, experts=experts, chunks=None)
