"""Linear combinations of adapters, exactly: by rank concatenation, without a product of matrices.

`sum_i c_i s_i B_i A_i = s B A` with `A` the rows of all `A_i` and `B` the columns of all
`(c_i s_i / s) B_i`, where `s_i` is the scale of a source and `s` that of the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine.spec import Layout


def mix(
    sources: Sequence[tuple[float, HostWeights]], layout_of: Callable[[AdapterSpec], Layout]
) -> HostWeights:
    """Return the adapter whose change of every module is the sum of `coefficient * change`.

    Its rank is the sum of the ranks; it trains what any of its sources does. One source with
    coefficient 1 gives the same bits. `sources` holds at least one, all of one base model.
    """
    spec = mixed_spec([weights.spec for _, weights in sources])
    layout = layout_of(spec)
    flat = torch.zeros(layout.size)
    mixed = layout.views(flat)
    first = 0
    for coefficient, source in sources:
        last = first + source.spec.rank
        factor = coefficient * (source.spec.scale / spec.scale)
        for name, pair in layout_of(source.spec).views(source.flat).items():
            mixed[name].a[first:last] = pair.a
            mixed[name].b[:, first:last] = pair.b * factor
        first = last
    return HostWeights(spec, flat)


def mixed_spec(specs: Sequence[AdapterSpec]) -> AdapterSpec:
    """Return what a combination of adapters is; its seed, never used again, is that of the first.

    It keeps an alpha that all have; of several it gets the default.
    """
    alphas = {spec.alpha for spec in specs}
    return AdapterSpec(
        rank=sum(spec.rank for spec in specs),
        seed=specs[0].seed,
        train_attn=any(spec.train_attn for spec in specs),
        train_mlp=any(spec.train_mlp for spec in specs),
        train_unembed=any(spec.train_unembed for spec in specs),
        alpha=alphas.pop() if len(alphas) == 1 else AdapterSpec.alpha,
    )
