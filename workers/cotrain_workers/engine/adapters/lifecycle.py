"""Ops on a whole adapter: begin a run with one, copy it to the host, put another in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from cotrain_workers.engine.adapters.adapter import discard_gradients, is_all_finite
from cotrain_workers.engine.adapters.bank import AdapterState, draw_weights
from cotrain_workers.engine.adapters.peft_import import ImportRefused, read_import
from cotrain_workers.engine.adapters.saved import SavedWeights
from cotrain_workers.engine.ops import (
    Create,
    CreateOutput,
    Failure,
    HostOptimizer,
    HostWeights,
    Import,
    Load,
    LoadOutput,
    SaveOutput,
    unknown_run,
)

if TYPE_CHECKING:
    from cotrain_workers.engine.adapters.bank import AdapterBank
    from cotrain_workers.engine.cycle import Yielding
    from cotrain_workers.engine.ops import Op, Save
    from cotrain_workers.engine.spec import AdapterSpec, Layout

    Beginning = Create | Import | Load

#: Of a first moment: a mean of gradients, each of which a step admitted (`adamw.largest_norm`).
LARGEST_MOMENT = 1e19


def begins_run(op: Op) -> TypeGuard[Beginning]:
    """Tell whether an op makes the run it belongs to."""
    return isinstance(op, Create | Import) or (isinstance(op, Load) and op.creates)


def begin(
    bank: AdapterBank, op: Beginning, max_rank: int
) -> Yielding[CreateOutput | LoadOutput | Failure]:
    """Make a run's adapter: fresh, from a checkpoint, or from an upload."""
    if op.run in bank:
        return Failure("The run exists already.", "server")
    if isinstance(op, Import):
        return _import(bank, op, max_rank)
    spec = op.spec if isinstance(op, Create) else op.weights.spec
    reason = refuse_spec(spec, max_rank)
    if reason:
        return Failure(reason, "user")
    if isinstance(op, Load):
        if refusal := refuse_state(op):
            return refusal
        _begin_with(bank, op.run, op.weights, op.optimizer)
        return LoadOutput(op.path)
    weights = yield from draw_weights(spec, bank.layout_of(spec))
    return CreateOutput(bank.create(op.run, spec, weights).layout.trainable_parameters)


def save(bank: AdapterBank, op: Save) -> SaveOutput | Failure:
    """Begin to copy a run's adapter to the host; with its optimizer state, if asked for."""
    if op.run not in bank:
        return unknown_run()
    adapter = bank[op.run]
    weights = SavedWeights(adapter, bank.carry_out(op.run, "weights"))
    if not op.optimizer:
        return SaveOutput(weights)
    moments = bank.carry_out(op.run, "m", "v").whole()
    m, v = moments["m"].float(), moments["v"].float()
    return SaveOutput(weights, HostOptimizer(adapter.spec, m, v, adapter.step))


def load(bank: AdapterBank, op: Load) -> LoadOutput | Failure:
    """Write a checkpoint over a run's adapter, which keeps its spec and its place in memory.

    Where alpha differs, B takes the ratio, so that the adapter adds what the checkpoint added.
    """
    if op.run not in bank:
        return unknown_run()
    adapter = bank[op.run]
    if refusal := refuse_state(op):
        return refusal
    if shape_of(op.weights.spec) != shape_of(adapter.spec):
        theirs, ours = describe(op.weights.spec), describe(adapter.spec)
        return Failure(f"Checkpoint {op.path} has {theirs}; this run has {ours}.", "user")
    flat = op.weights.flat
    if op.weights.spec.alpha != adapter.spec.alpha:
        if op.optimizer:
            return Failure(f"Checkpoint {op.path} has an optimizer state of another alpha.", "user")
        flat = _scaled(flat, adapter.layout, op.weights.spec.alpha / adapter.spec.alpha)
        if not torch.isfinite(flat).all():
            return Failure(f"Checkpoint {op.path} has too large an alpha for this run.", "user")
    adapter.hold_compute()
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


def refuse_state(op: Load) -> Failure | None:
    """Return the failure of a load whose weights or moments no step could go on from, or None."""
    if not is_all_finite(op.weights.flat):
        return Failure(
            f"Checkpoint {op.path} holds weights that are not finite. Load an earlier one.", "user"
        )
    moments = op.optimizer
    if moments is None or (
        is_all_finite(moments.v) and float(moments.m.abs().max()) <= LARGEST_MOMENT
    ):
        return None
    return Failure(
        f"Checkpoint {op.path} holds an optimizer state that is not finite, with which weights would never move"
        " again. Load it without the optimizer (load_state, create_training_client_from_state).",
        "user",
    )


def refuse_spec(spec: AdapterSpec, max_rank: int) -> str | None:
    """Return why no run can have such an adapter, as a sentence for the tenant, or None."""
    if not 1 <= spec.rank <= max_rank:
        return f"Rank {spec.rank} is outside 1..{max_rank}."
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        return "Nothing to train: set train_attn, train_mlp or train_unembed."
    return None


def shape_of(spec: AdapterSpec) -> tuple[object, ...]:
    """Return what two adapters share if their matrices have the same places and shapes."""
    return spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed


def describe(spec: AdapterSpec) -> str:
    """Name what `shape_of` compares."""
    return (
        f"rank {spec.rank}, train_attn={spec.train_attn}, train_mlp={spec.train_mlp}, "
        f"train_unembed={spec.train_unembed}"
    )


def _scaled(flat: torch.Tensor, layout: Layout, ratio: float) -> torch.Tensor:
    """Return a copy of an arena `[size]` with every B multiplied by `ratio`."""
    copy = flat.clone()
    for pair in layout.views(copy).values():
        pair.b.copy_(pair.b.double() * ratio)
    return copy


def _import(bank: AdapterBank, op: Import, max_rank: int) -> CreateOutput | Failure:
    try:
        weights = read_import(op.adapter, bank.layout_of, max_rank)
    except ImportRefused as refused:
        return Failure(str(refused), "user")
    _begin_with(bank, op.run, weights, None)
    return CreateOutput(bank[op.run].layout.trainable_parameters)


def _begin_with(
    bank: AdapterBank, run: str, weights: HostWeights, optimizer: HostOptimizer | None
) -> None:
    if optimizer is None:
        bank.create(run, weights.spec, weights.flat)
        return
    state = AdapterState(
        weights.spec,
        weights.flat,
        grads=torch.zeros_like(weights.flat),
        m=optimizer.m,
        v=optimizer.v,
        step=optimizer.step,
        grads_pending=False,
    )
    bank.restore(run, state)
