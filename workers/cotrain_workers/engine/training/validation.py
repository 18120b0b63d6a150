"""What the engine checks on the host before a pass may touch the device.

The server has checked all of it before; a wrong index on a GPU would kill the process of every tenant.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cotrain_workers.engine.training.losses import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.ops import Datum, KlDatum, Pass, ReverseKl
    from cotrain_workers.engine.spec import AdapterSpec, Layout
    from cotrain_workers.engine.training.losses import LossSpec

TARGETS = "target_tokens"


def refuse_pass(op: Pass, vocab_size: int, context_length: int) -> str | None:
    """Return why this pass cannot run, as a sentence for the tenant, or None."""
    loss = LOSSES.get(op.loss_fn)
    if loss is None:
        return f"Unknown loss_fn {op.loss_fn!r}; known are {', '.join(sorted(LOSSES))}."
    unknown = sorted(set(op.loss_config) - set(loss.defaults))
    if unknown:
        return f"Loss {op.loss_fn!r} has no setting {unknown[0]!r}."
    for at, datum in enumerate(op.datums):
        reason = refuse_shapes(op.loss_fn, loss, datum, context_length)
        reason = reason or refuse_tokens(datum, vocab_size)
        if reason:
            return f"{reason} (datum {at})."
    return None


def refuse_reverse_kl(
    op: ReverseKl,
    vocab_size: int,
    context_length: int,
    *,
    layout_of: Callable[[AdapterSpec], Layout],
) -> str | None:
    """Return why this reverse KL cannot run, as a sentence for the tenant, or None."""
    if not 0 < op.temperature < math.inf:
        return f"temperature is {op.temperature}; it must be positive and finite."
    reference = op.reference
    if reference and reference.flat.shape != (layout_of(reference.spec).size,):
        return "The reference was made for another base model."
    for at, datum in enumerate(op.datums):
        reason = refuse_kl_shapes(datum, context_length)
        reason = reason or refuse_outside("Token", datum.tokens, vocab_size)
        reason = reason or refuse_outside("Reference token", datum.reference, vocab_size)
        if reason:
            return f"{reason} (datum {at})."
    return None


def refuse_kl_shapes(datum: KlDatum, context_length: int) -> str | None:
    """Return what is wrong with the lengths of a reverse KL's datum, or None."""
    for tokens in (datum.tokens, datum.reference):
        if not 0 < len(tokens) <= context_length:
            return f"A datum has 1 to {context_length} tokens, not {len(tokens)}"
    most = min(len(datum.tokens), len(datum.reference))
    if datum.weights.ndim != 1 or not 0 < len(datum.weights) <= most:
        return (
            f"weights has shape {list(datum.weights.shape)}; there is room for 1 to {most} targets"
        )
    return None


def refuse_shapes(name: str, loss: LossSpec, datum: Datum, context_length: int) -> str | None:
    """Return what is wrong with the lengths and shapes of a datum, or None."""
    length = len(datum.tokens)
    if not 0 < length <= context_length:
        return f"A datum has 1 to {context_length} tokens, not {length}"
    if TARGETS not in datum.inputs:
        return f"Loss {name!r} needs loss_fn_inputs[{TARGETS!r}]"
    shape = datum.inputs[TARGETS].shape
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        return f"{TARGETS} has shape {list(shape)}; it must be [{length}] or [{length}, K]"
    for wanted in loss.inputs:
        if wanted not in datum.inputs:
            return f"Loss {name!r} needs loss_fn_inputs[{wanted!r}]"
        if datum.inputs[wanted].shape != shape:
            return f"{wanted} has shape {list(datum.inputs[wanted].shape)}; {TARGETS} has {list(shape)}"
    return None


def refuse_tokens(datum: Datum, vocab_size: int) -> str | None:
    """Return which token id lies outside the vocabulary, or None."""
    reason = refuse_outside("Token", datum.tokens, vocab_size)
    return reason or refuse_outside("Target token", datum.inputs[TARGETS], vocab_size)


def refuse_outside(name: str, tokens: np.ndarray, vocab_size: int) -> str | None:
    """Return which of these token ids lies outside the vocabulary, or None."""
    outside = (tokens < 0) | (tokens >= vocab_size)
    if not outside.any():
        return None
    where = np.argwhere(outside)[0]
    return (
        f"{name} id {tokens[tuple(where)]} at position {where[0]} "
        f"is outside the vocabulary (0..{vocab_size - 1})"
    )
