"""Ops on a whole adapter: begin a run with one, copy it to the host, replace it.

`mix` computes linear combinations of adapters exactly, by rank concatenation and without a product
of matrices. Formula: `sum_i c_i s_i B_i A_i = s B A` with `A` the rows of all `A_i` and `B` the
columns of all `(c_i s_i / s) B_i`. `s_i` is the scale of a source and `s` that of the result.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from cotrain_workers.engine.adapters.adapter import Adapter, discard_gradients, draw_weights, is_all_finite
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.adapters.copies import AdapterState, HostArenas
from cotrain_workers.engine.adapters.peft_import import ImportRefused, read_import
from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.ops import (
    Beginning,
    Create,
    CreateOutput,
    Failure,
    HostOptimizer,
    HostWeights,
    Import,
    Load,
    LoadOutput,
    Save,
    SaveOutput,
    unknown_run,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout, shape_of

#: Limit of a first moment: a mean of gradients, each admitted by a step (`adamw.largest_norm`).
LARGEST_MOMENT = 1e19


class SavedWeights(HostWeights):
    """Weights of an adapter at the time of the save."""

    _arriving: HostArenas | None
    _adapter: weakref.ref[Adapter]
    _version: int
    _bytes: int

    def __init__(self, adapter: Adapter, arriving: HostArenas) -> None:
        vars(self).update(  # the class is frozen
            spec=adapter.spec,
            _arriving=arriving,
            _adapter=weakref.ref(adapter),
            _version=adapter.version,
            _bytes=arriving.bytes,
        )

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[explicit-override]
        """Pickle as plain weights, once they have arrived."""
        return HostWeights, (self.spec, self.flat)

    @cached_property
    def flat(self) -> torch.Tensor:  # type: ignore[explicit-override]
        """The weights, once they have arrived."""
        arriving = self._arriving
        if arriving is None:  # another thread was faster
            return self.flat
        flat = arriving.whole()["weights"].float()
        vars(self).update(flat=flat, _arriving=None)  # the blocks are free for other copies
        return flat

    @property
    def bytes(self) -> int:  # type: ignore[explicit-override]
        """Size of the weights."""
        return self._bytes

    def on_device(self) -> torch.Tensor | None:  # type: ignore[explicit-override]
        """Return the adapter's own arena while it holds these weights."""
        adapter = self._adapter()
        if adapter is None or adapter.version != self._version or adapter.on_host is not None:
            return None
        if adapter.weights.dtype != torch.float32:
            return None
        adapter.await_copies()
        return adapter.weights


def begin(bank: AdapterBank, op: Beginning, max_rank: int) -> Yielding[CreateOutput | LoadOutput | Failure]:
    """Create a run's adapter: fresh, from a checkpoint, or from an upload."""
    if op.run in bank:
        return Failure("The run exists already.", "server")
    if isinstance(op, Import):
        return _import(bank, op, max_rank)
    spec = op.spec if isinstance(op, Create) else replace(op.weights.spec, optimizer=op.optimizer_type)
    reason = _refuse_spec(spec, max_rank)
    if reason:
        return Failure(reason, "user")
    if isinstance(op, Load):
        if refusal := _refuse_state(op):
            return refusal
        _begin_with(bank, op.run, spec, op.weights, op.optimizer)
        return LoadOutput(op.path)
    weights = yield from draw_weights(spec, bank.layout_of(spec))
    return CreateOutput(bank.create(op.run, spec, weights).layout.trainable_parameters)


def save(bank: AdapterBank, op: Save) -> SaveOutput | Failure:
    """Start a copy of a run's adapter to the host, with its optimizer state if requested."""
    if op.run not in bank:
        return unknown_run()
    adapter = bank[op.run]
    weights = SavedWeights(adapter, bank.copy_arenas(op.run, "weights"))
    if not op.optimizer:
        return SaveOutput(weights)
    moments = bank.copy_arenas(op.run, "m", "v").whole()
    m, v = moments["m"].float(), moments["v"].float()
    return SaveOutput(weights, HostOptimizer(adapter.spec, m, v, adapter.step))


def load(bank: AdapterBank, op: Load) -> LoadOutput | Failure:
    """Write a checkpoint over a run's adapter, which keeps its spec and its arenas.

    If alpha differs, B is multiplied by the ratio, so that the adapter adds the same as the checkpoint.
    """
    if op.run not in bank:
        return unknown_run()
    adapter = bank[op.run]
    if refusal := _refuse_state(op):
        return refusal
    if shape_of(op.weights.spec) != shape_of(adapter.spec):
        theirs, ours = describe(op.weights.spec), describe(adapter.spec)
        return Failure(f"Checkpoint {op.path} has {theirs}; this run has {ours}.", "user")
    if op.optimizer and op.optimizer.spec.optimizer != adapter.spec.optimizer:
        return Failure(
            f"Checkpoint {op.path} has an optimizer state of {op.optimizer.spec.optimizer}; this run has"
            f" {adapter.spec.optimizer}. Load it without the optimizer.",
            "user",
        )
    flat = op.weights.flat
    if op.weights.spec.alpha != adapter.spec.alpha:
        if op.optimizer:
            return Failure(f"Checkpoint {op.path} has an optimizer state of another alpha.", "user")
        flat = _scaled(flat, adapter.layout, op.weights.spec.alpha / adapter.spec.alpha)
        if not torch.isfinite(flat).all():
            return Failure(f"Checkpoint {op.path} has too large an alpha for this run.", "user")
    adapter.await_copies()
    adapter.weights.copy_(flat)
    adapter.weights_changed()
    discard_gradients([adapter])
    if op.optimizer:
        adapter.m.copy_(op.optimizer.m)
        adapter.v.copy_(op.optimizer.v)
        adapter.step = op.optimizer.step
    else:
        adapter.m.zero_()
        adapter.v.zero_()
        adapter.step = 0
    return LoadOutput(op.path)


def _refuse_state(op: Load) -> Failure | None:
    """Return the failure of a load whose weights or moments no step could continue from, or None."""
    if not is_all_finite(op.weights.flat):
        return Failure(f"Checkpoint {op.path} holds weights that are not finite. Load an earlier one.", "user")
    moments = op.optimizer
    if moments is None or (is_all_finite(moments.v) and float(moments.m.abs().max()) <= LARGEST_MOMENT):
        return None
    return Failure(
        f"Checkpoint {op.path} holds an optimizer state that is not finite, with which weights would never move"
        " again. Load it without the optimizer (load_state, create_training_client_from_state).",
        "user",
    )


def _refuse_spec(spec: AdapterSpec, max_rank: int) -> str | None:
    """Return why no run can have such an adapter, as a sentence for the tenant, or None."""
    if not 1 <= spec.rank <= max_rank:
        return f"Rank {spec.rank} is outside 1..{max_rank}."
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        return "Nothing to train: set train_attn, train_mlp or train_unembed."
    return None


def describe(spec: AdapterSpec) -> str:
    """Return the description of the values in `shape_of`."""
    return (
        f"rank {spec.rank}, train_attn={spec.train_attn}, train_mlp={spec.train_mlp}, "
        f"train_unembed={spec.train_unembed}" + (", per_expert=True" if spec.per_expert else "")
    )


def _scaled(flat: torch.Tensor, layout: Layout, ratio: float) -> torch.Tensor:
    """Return a copy of an arena `[size]` with every B multiplied by `ratio`."""
    copy = flat.clone()
    for pair in layout.views(copy).values():
        pair.b.copy_(pair.b.double() * ratio)
    return copy


def _import(bank: AdapterBank, op: Import, max_rank: int) -> CreateOutput | Failure:
    try:
        weights = read_import(op.adapter, bank.layout_of, max_rank, bank.base_weights)
    except ImportRefused as refused:
        return Failure(str(refused), "user")
    _begin_with(bank, op.run, weights.spec, weights, None)
    return CreateOutput(bank[op.run].layout.trainable_parameters)


def _begin_with(
    bank: AdapterBank, run: str, spec: AdapterSpec, weights: HostWeights, optimizer: HostOptimizer | None
) -> None:
    if optimizer is None:
        bank.create(run, spec, weights.flat)
    else:
        bank.restore(run, AdapterState.of(spec, weights, optimizer))


def mix(sources: Sequence[tuple[float, HostWeights]], layout_of: Callable[[AdapterSpec], Layout]) -> HostWeights:
    """Return the adapter whose change of every module is the sum of `coefficient * change`.

    Its rank is the sum of the ranks, and it trains the union of the sources' modules. One source with coefficient 1
    yields the same bits. `sources` has at least one entry, all of one base model.
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
            mixed[name].a[..., first:last, :] = pair.a
            mixed[name].b[..., first:last] = pair.b * factor
        first = last
    return HostWeights(spec, flat)


def mixed_spec(specs: Sequence[AdapterSpec]) -> AdapterSpec:
    """Return the spec of a combination of adapters; its seed, never used again, is that of the first.

    A common alpha is kept; otherwise it is the default.
    """
    alphas = {spec.alpha for spec in specs}
    return AdapterSpec(
        rank=sum(spec.rank for spec in specs),
        seed=specs[0].seed,
        train_attn=any(spec.train_attn for spec in specs),
        train_mlp=any(spec.train_mlp for spec in specs),
        train_unembed=any(spec.train_unembed for spec in specs),
        alpha=alphas.pop() if len(alphas) == 1 else AdapterSpec.alpha,
        per_expert=any(spec.per_expert for spec in specs),
    )
