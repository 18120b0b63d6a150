"""Fingerprints of ops' outputs and of runs' states: their numbers, and digests of large arrays."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import (
    CreateOutput,
    Failure,
    HostOptimizer,
    LoadOutput,
    NoteOutput,
    Output,
    PassOutput,
    ReverseKlOutput,
    SaveOutput,
    StepOutput,
)


@dataclass(frozen=True)
class ArenaPrint:
    """Digest and norm of an array that is too large to be stored."""

    sha256: str
    norm: float  # L2, for a comparison that is not to the bit


@dataclass(frozen=True)
class Fingerprint:
    """Comparable form of an output or a state. Equal fingerprints mean equal bits."""

    text: str  # description without numbers of arrays
    is_accident: bool = False  # True for a failure of the server itself, which a replay would not repeat
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)  # float32 or float64 [n]
    arenas: Mapping[str, ArenaPrint] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return a digest of 16 characters of everything that is compared."""
        hasher = hashlib.sha256(self.text.encode())
        for name, values in self.numbers.items():
            hasher.update(f"\0{name}\0".encode() + values.tobytes())
        for name, arena in self.arenas.items():
            hasher.update(f"\0{name}\0{arena.sha256}".encode())
        return hasher.hexdigest()[:16]


def fingerprint_of(output: Output) -> Fingerprint:
    """Return the fingerprint of an op's output."""
    match output:
        case PassOutput(logprobs, loss_sum, _):
            return Fingerprint("pass", numbers={"log-probs": _joined(logprobs), **_scalars(loss=loss_sum)})
        case ReverseKlOutput(losses, loss_sum, kl_sum, weighted_tokens):
            sums = _scalars(loss=loss_sum, divergence=kl_sum)
            text = f"reverse KL of {weighted_tokens} tokens"
            return Fingerprint(text, numbers={"losses": _joined(losses), **sums})
        case StepOutput(grad_norm):
            return Fingerprint("optimizer step", numbers=_scalars(gradient_norm=grad_norm))
        case CreateOutput(trainable_parameters):
            return Fingerprint(f"adapter of {trainable_parameters} parameters")
        case LoadOutput(path):
            return Fingerprint(f"load of {path}")
        case NoteOutput():
            return Fingerprint("record")
        case SaveOutput(weights, optimizer):
            saved = {"weights": _arena(weights.flat), **_moments(optimizer)}
            return Fingerprint(f"save of rank {weights.spec.rank}, {_steps(optimizer)}", arenas=saved)
        case Failure(message, category):
            return Fingerprint(f"{category} error: {message}", is_accident=category == "server")


def fingerprint_of_state(state: AdapterState) -> Fingerprint:
    """Return the fingerprint of a run's state."""
    pending = "a gradient pending" if state.grads_pending else "no gradient"
    arenas = {"weights": state.weights, "gradient": state.grads, "Adam m": state.m, "Adam v": state.v}
    return Fingerprint(
        f"rank {state.spec.rank}, step {state.step}, {pending}",
        arenas={name: _arena(arena) for name, arena in arenas.items()},
    )


def differences(before: Fingerprint, after: Fingerprint, tolerance: float) -> list[str]:
    """Return the differences of two fingerprints, one phrase each; bits are compared if `tolerance` is 0."""
    if before.text != after.text:
        return [f"{before.text!r} became {after.text!r}"]
    return [
        *_different_numbers(before.numbers, after.numbers, tolerance),
        *_different_arenas(before.arenas, after.arenas, tolerance),
    ]


def _different_numbers(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], tolerance: float
) -> Iterator[str]:
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape:
            yield f"{name}: {old.size} values became {new.size}"
            continue
        bad = _unequal(old, new, tolerance)
        if bad.any():
            at = int(bad.argmax())
            where = f" at {at}, and {int(bad.sum()) - 1} more" if old.size > 1 else ""
            yield f"{name}: {old[at]:.9g} became {new[at]:.9g}{where}"


def _unequal(old: np.ndarray, new: np.ndarray, tolerance: float) -> np.ndarray:
    """Mark the places that differ, bool [n]: bits, or beyond the tolerance."""
    if tolerance:
        close: np.ndarray = np.isclose(new, old, rtol=tolerance, atol=tolerance, equal_nan=True)
        return ~close
    bits = np.dtype(f"u{old.itemsize}")
    different: np.ndarray = old.view(bits) != new.view(bits)
    return different


def _different_arenas(
    before: Mapping[str, ArenaPrint], after: Mapping[str, ArenaPrint], tolerance: float
) -> Iterator[str]:
    for name, old in before.items():
        new = after[name]
        if old.sha256 == new.sha256:
            continue
        if not math.isclose(old.norm, new.norm, rel_tol=tolerance):
            yield f"{name}: norm {old.norm:.9g} became {new.norm:.9g}"
        elif not tolerance:
            yield f"{name}: other bits, of the same norm {old.norm:.9g}"


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *(array.ravel() for array in arrays)])


def _scalars(**values: float) -> dict[str, np.ndarray]:
    return {name.replace("_", " "): np.array([value], np.float64) for name, value in values.items()}


def _moments(optimizer: HostOptimizer | None) -> dict[str, ArenaPrint]:
    return {"Adam m": _arena(optimizer.m), "Adam v": _arena(optimizer.v)} if optimizer else {}


def _steps(optimizer: HostOptimizer | None) -> str:
    return f"step {optimizer.step}" if optimizer else "without optimizer state"


def _arena(arena: torch.Tensor) -> ArenaPrint:
    content = arena.contiguous().numpy()
    return ArenaPrint(hashlib.sha256(content.data).hexdigest(), float(arena.double().norm()))
