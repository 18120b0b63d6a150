"""Validation of training requests before they enter the log. Pure. Error messages are for the tenant.

Nothing invalid may be accepted: an invalid token id would crash the device for every tenant, and a
replay must never contain an op that cannot run. A request refused here still takes its seq in the
run's order (as a rejected op), because its client has already used the seq_id.

`NEEDS_BY_LOSS` lists the inputs and settings of each loss. The engine implements the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from cotrain.errors import UnsupportedInput
from cotrain.wire.constants import CUSTOM, NO_POLICY_STEP, ROUTED_EXPERTS
from cotrain_server.errors import Invalid
from cotrain_store.bodies.pass_body import DatumArrays, PassBody
from cotrain_store.messages.runs import PoolRecord

if TYPE_CHECKING:  # the child processes that check passes start faster without the wire's models
    from cotrain.wire.custom_loss import CustomLoss
    from cotrain.wire.runs import AdamParams, MuonParams

TARGETS = "target_tokens"
#: Input of every loss that only metrics read: steps of the policies that sampled the targets.
POLICY_STEP = "policy_step"
MAX_POLICY_STEP = 2**31 - 1
#: Expert of a token whose experts the router chooses.
NOT_GIVEN = -1
#: Workers compute in float32. PyTorch refuses some larger numbers in the middle of a pass. The pass
#: must then run in parts, for other tenants too.
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class LossNeeds:
    """Inputs and settings that one loss requires of a request."""

    inputs: tuple[str, ...]  # required loss inputs other than `target_tokens`, one float per target
    config: frozenset[str] = field(default_factory=frozenset)
    """Allowed numbers in `loss_fn_config`, each at least 0."""
    bounds_surrogate: bool = False
    """True if a ratio out of bounds has no gradient, so that the bounds must enclose 1."""
    optional: tuple[str, ...] = ()  # inputs that all datums have, or none
    takes_columns: bool = False  # True if targets may be `(N, K)`: K weighted targets per position


_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
_POLICY = ("logprobs", "advantages")
_ROLLOUT = ("rollout_logprobs",)
#: Settings of every policy loss.
_CORRECTIONS = frozenset({"importance_cap", "sequence_mask_above"})
#: Inputs that a setting above 0 requires.
_INPUT_OF = {"importance_cap": "rollout_logprobs", "beta": "reference_logprobs"}


def _policy(
    config: AbstractSet[str] = frozenset(),
    *more: str,
    optional: tuple[str, ...] = _ROLLOUT,
    bounds_surrogate: bool = False,
) -> LossNeeds:
    return LossNeeds((*_POLICY, *more), _CORRECTIONS | config, bounds_surrogate, optional)


NEEDS_BY_LOSS: Mapping[str, LossNeeds] = MappingProxyType(
    {
        "cross_entropy": LossNeeds(("weights",), takes_columns=True),
        "importance_sampling": _policy(),
        "ppo": _policy(_CLIP, bounds_surrogate=True),
        "cispo": _policy(_CLIP),
        "dro": _policy({"beta"}),
        "gspo": _policy(_CLIP, "sequence_ratio_mask", bounds_surrogate=True),
        "reinforce": _policy(),
        "grpo": _policy(_CLIP | {"beta"}, optional=(*_ROLLOUT, "reference_logprobs"), bounds_surrogate=True),
        "dapo": _policy(_CLIP, bounds_surrogate=True),
        "sapo": _policy({"tau_positive", "tau_negative"}),
    }
)


#: Inputs that some loss reads.
_READ = {TARGETS, *(name for needs in NEEDS_BY_LOSS.values() for name in (*needs.inputs, *needs.optional))}
_IGNORED = " Targets of -100 are not ignored here: give them weight 0 and any token id."


def check_pass(request: PassBody, pool: PoolRecord) -> int:
    """Check a forward or forward_backward request against its loss and its base model; return its cost in tokens.

    A custom loss costs one token for each node and datum, because a node takes about the time of a token.

    Raises:
        Invalid: the message names the datum and the field.
    """
    if not request.datums:
        raise Invalid("data is empty; send at least one datum.")
    custom = _custom_loss(request) if request.loss_fn == CUSTOM else None
    needs = _needs_of(request.loss_fn) if custom is None else _needs_of_custom(custom)
    if custom is None:
        needs = _with_optional(request, needs)
        _check_config(request.loss_fn, needs, request.loss_config)
    for number, datum in enumerate(request.datums):
        _check_lengths(number, datum, pool)
        if custom is None:
            _check_shapes(number, datum, request.loss_fn, needs)
        else:
            _check_custom_shapes(number, datum, custom)
    check_tokens("Token", [datum.tokens for datum in request.datums], pool.vocab_size)
    targets = [datum.inputs[TARGETS] for datum in request.datums]
    check_tokens("Target token", targets, pool.vocab_size)
    for number, datum in enumerate(request.datums):
        if datum.routed_experts is not None:
            field = f"data[{number}].loss_fn_inputs.{ROUTED_EXPERTS}"
            check_experts(field, datum.routed_experts, len(datum.tokens), pool)
    for name in needs.inputs:
        check_finite(f"loss_fn_inputs.{name}", [datum.inputs[name] for datum in request.datums])
    for number, datum in enumerate(request.datums):
        if POLICY_STEP in datum.inputs:
            _check_policy_step(f"data[{number}].loss_fn_inputs.{POLICY_STEP}", datum)
    nodes = len(custom.graph.nodes) if custom else 0
    return request.num_tokens + nodes * len(request.datums)


def _needs_of(loss_fn: str) -> LossNeeds:
    if loss_fn not in NEEDS_BY_LOSS:
        raise Invalid(f"loss_fn {loss_fn!r:.80} is not known. Known: {', '.join(NEEDS_BY_LOSS)}.")
    return NEEDS_BY_LOSS[loss_fn]


def _with_optional(request: PassBody, needs: LossNeeds) -> LossNeeds:
    """Return the needs with the optional inputs of the first datum, which all datums then need. Raises Invalid."""
    given = tuple(name for name in needs.optional if name in request.datums[0].inputs)
    for setting, wanted in _INPUT_OF.items():
        number = request.loss_config.get(setting, 0.0)
        if number and wanted in needs.optional and wanted not in given:
            raise Invalid(f"data[0].loss_fn_inputs.{wanted} is missing; loss_fn_config.{setting}={number} needs it.")
    return replace(needs, inputs=(*needs.inputs, *given))


def _custom_loss(request: PassBody) -> CustomLoss:
    from cotrain.wire.custom_loss import LOSS_ID, MAX_NODE_RUNS, decode_loss

    loss_id = request.loss_config.get(LOSS_ID)
    if len(request.loss_config) > 1 or not isinstance(loss_id, str):
        raise Invalid("loss_fn_config of loss custom must be {'loss_id': …}, from create_custom_loss.")
    try:
        loss = decode_loss(loss_id)
    except UnsupportedInput as error:
        raise Invalid(str(error)) from error
    runs = len(loss.graph.nodes) * len(request.datums)
    if runs > MAX_NODE_RUNS:
        raise Invalid(
            f"data has {len(request.datums)} datums for a custom loss of {len(loss.graph.nodes)} nodes: {runs} in"
            f" all, at most {MAX_NODE_RUNS} are allowed. Send fewer datums in one call."
        )
    return loss


def _needs_of_custom(loss: CustomLoss) -> LossNeeds:
    return LossNeeds(tuple(each.name for each in loss.inputs[1:] if each.name != TARGETS))


def _check_custom_shapes(number: int, datum: DatumArrays, loss: CustomLoss) -> None:
    """Check that a datum has each input of a custom loss, with its rank."""
    length = len(datum.tokens)
    for name, rank in ((TARGETS, loss.inputs[0].rank), *((i.name, i.rank) for i in loss.inputs[1:])):
        if name not in datum.inputs:
            raise Invalid(f"data[{number}].loss_fn_inputs.{name} is missing; the custom loss reads it.")
        shape = datum.inputs[name].shape
        fits = (datum.inputs[name].size == 1, shape == (length,), _is_table(shape, length))[rank]
        if not fits:
            expected = ("a scalar", f"[{length}]", f"[{length}, K]")[rank]
            raise Invalid(_wrong_shape(number, name, shape, f"the custom loss reads {expected}"))


def _check_config(loss_fn: str, needs: LossNeeds, config: Mapping[str, float | str]) -> None:
    numbers: dict[str, float] = {}
    for name, value in config.items():
        if name not in needs.config:
            known = ", ".join(sorted(needs.config)) or "none"
            raise Invalid(f"loss_fn_config.{name:.80} is not a setting of {loss_fn}. Known: {known}.")
        if isinstance(value, str) or not 0 <= value <= LARGEST:
            raise Invalid(f"loss_fn_config.{name} must be a finite number, 0 or more.")
        if name.startswith("tau_") and value <= 0:
            raise Invalid(f"loss_fn_config.{name} must be above 0.")
        numbers[name] = value
    low = numbers.get("clip_low_threshold", 0.0)
    high = numbers.get("clip_high_threshold", max(low, 1.0))
    if low > high:
        raise Invalid("loss_fn_config.clip_low_threshold is above clip_high_threshold.")
    if needs.bounds_surrogate and not low <= 1 <= high:
        name = "clip_high_threshold" if high < 1 else "clip_low_threshold"
        raise Invalid(
            f"loss_fn_config.{name}={numbers[name]:g}: the ratio is 1 before the first step, and {loss_fn} trains"
            " nothing outside its bounds. They are ratios, not distances: cliprange=0.2 elsewhere is"
            " clip_low_threshold=0.8 and clip_high_threshold=1.2 here."
        )


def refuse_too_long(subject: str, length: int, pool: PoolRecord) -> None:
    """Raise Invalid for a datum that does not fit into the memory of the pool's device."""
    if length > pool.longest_datum:
        raise Invalid(
            f"{subject} {length} tokens; the longest datum that fits into the memory of this {pool.device} device "
            f"has {pool.longest_datum}. Split it, or use a device with more memory."
        )


def _check_lengths(number: int, datum: DatumArrays, pool: PoolRecord) -> None:
    length = len(datum.tokens)
    if not 1 <= length <= pool.context_length:
        raise Invalid(f"Datum {number} has {length} tokens; {pool.base_model} reads 1 to {pool.context_length}.")
    refuse_too_long(f"Datum {number} has", length, pool)


def _check_shapes(number: int, datum: DatumArrays, loss_fn: str, needs: LossNeeds) -> None:
    length = len(datum.tokens)
    for name in (TARGETS, *needs.inputs):
        if name not in datum.inputs:
            unread = sorted(set(datum.inputs) - {TARGETS, *needs.inputs})
            hint = f" No loss reads {unread[0]:.80}." if unread and unread[0] not in _READ else ""
            raise Invalid(f"data[{number}].loss_fn_inputs.{name} is missing; {loss_fn} needs it.{hint}")
    shape = datum.inputs[TARGETS].shape
    if shape != (length,) and not (needs.takes_columns and _is_table(shape, length)):
        raise Invalid(_wrong_shape(number, TARGETS, shape, f"the input has {length} tokens"))
    for name in needs.inputs:
        found = datum.inputs[name].shape
        if found != shape:
            raise Invalid(_wrong_shape(number, name, found, f"{TARGETS} has {list(shape)}"))


def _is_table(shape: tuple[int, ...], length: int) -> bool:
    return len(shape) == 2 and shape[0] == length and shape[1] >= 1


def _wrong_shape(number: int, name: str, shape: tuple[int, ...], because: str) -> str:
    return f"data[{number}].loss_fn_inputs.{name} has shape {list(shape)}, but {because}."


def _check_policy_step(field: str, datum: DatumArrays) -> None:
    steps, length = datum.inputs[POLICY_STEP], len(datum.tokens)
    if steps.shape != (length,):
        raise Invalid(f"{field} has shape {list(steps.shape)}, but the input has {length} tokens.")
    bad = (steps < NO_POLICY_STEP) | (steps > MAX_POLICY_STEP) | (steps != np.floor(steps))
    if bad.any():
        at = int(bad.argmax())
        raise Invalid(
            f"{field}[{at}] is {steps[at]}, but must be an optimizer step (0..{MAX_POLICY_STEP}), or {NO_POLICY_STEP} "
            "for a target that no policy of this run sampled. Use `sequence.policy_steps` of a sample."
        )


def check_tokens(what: str, ids: Sequence[np.ndarray], vocab_size: int) -> None:
    """Check the token ids of all datums at once. Raises Invalid: only then is the fault located."""
    everything = np.concatenate([array.ravel() for array in ids])
    if everything.min() >= 0 and everything.max() < vocab_size:
        return
    for number, array in enumerate(ids):
        bad = np.argwhere((array < 0) | (array >= vocab_size))
        if len(bad):
            token = array[tuple(bad[0])]
            raise Invalid(
                f"{what} id {token} at datum {number}, position {_indices(bad[0])} is "
                f"outside the vocabulary (0..{vocab_size - 1}).{_IGNORED if token == -100 else ''}"
            )


def check_finite(name: str, values: Sequence[np.ndarray]) -> None:
    """Check a field of some datums for NaN and infinity. Raises Invalid."""
    if np.isfinite(np.concatenate([array.ravel() for array in values])).all():
        return
    for number, array in enumerate(values):
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            raise Invalid(f"data[{number}].{name}[{_indices(bad[0])}] is not finite.")


def expert_choices(pool: PoolRecord, field: str) -> tuple[int, int, int]:
    """Return the layers with experts, the experts of a token and those of a layer. Raises Invalid without them."""
    if pool.expert_choices is None:
        raise Invalid(f"{field}: {pool.base_model} has no experts to choose from. Leave it out.")
    return pool.expert_choices


def check_experts(field: str, given: np.ndarray, length: int, pool: PoolRecord) -> None:
    """Check the experts of a datum of `length` tokens. Raises Invalid."""
    layers, chosen, experts = expert_choices(pool, field)
    if given.shape != (length, layers, chosen):
        raise Invalid(
            f"{field} has shape {list(given.shape)}, but must be {[length, layers, chosen]}: tokens of the input, layers "
            f"with experts of {pool.base_model}, and experts of a token."
        )
    bad = (given < NOT_GIVEN) | (given >= experts)
    if bad.any():
        at = np.argwhere(bad)[0]
        raise Invalid(
            f"{field}[{_indices(at)}] is {given[tuple(at)]}, but must be an expert (0..{experts - 1}), or {NOT_GIVEN} for "
            "the router's own choice."
        )
    ordered = np.sort(given, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NOT_GIVEN)
    mixed = (ordered[..., 0] == NOT_GIVEN) & (ordered[..., -1] != NOT_GIVEN)
    if twice.any():
        at = np.argwhere(twice.any(axis=-1))[0]
        raise Invalid(f"{field}[{_indices(at)}] names an expert twice.")
    if mixed.any():
        at = np.argwhere(mixed)[0]
        raise Invalid(f"{field}[{_indices(at)}] must be {NOT_GIVEN} for all experts or for none.")


def _indices(index: np.ndarray) -> str:
    return ", ".join(str(axis) for axis in index)


def check_steps(field: str, params: AdamParams | MuonParams) -> None:
    """Check the numbers of an optim_step that its wire type does not constrain. Raises Invalid."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        if abs(getattr(params, name)) > LARGEST:
            raise Invalid(f"{field}.{name} is larger than a float32 can be.")
    if params.grad_clip_norm < 0:
        raise Invalid(f"{field}.grad_clip_norm must be 0, which is no limit, or more.")


def check_adam(params: AdamParams) -> None:
    """Check the numbers of an AdamW step that the wire type does not constrain. Raises Invalid."""
    check_steps("adam_params", params)
    if params.eps > LARGEST:
        raise Invalid("adam_params.eps is larger than a float32 can be.")
    # A row without any gradient has m = v = 0, and 0 / (0 + 0) is NaN.
    if params.eps <= 0:
        raise Invalid("adam_params.eps must be greater than 0.")
    if params.eps < SMALLEST:
        raise Invalid("adam_params.eps is 0 as a float32.")


def check_rank(rank: int, max_rank: int) -> None:
    """Check a new run's rank. Raises Invalid."""
    if not 1 <= rank <= max_rank:
        raise Invalid(f"rank must be between 1 and {max_rank}.")
