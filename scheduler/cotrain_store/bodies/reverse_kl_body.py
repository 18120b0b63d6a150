"""Codec for the body of a reverse-KL request, and encoder of its result.

A body is the length of a JSON text, the text with the settings, then the arrays of all datums in binary.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import WeightsRef

#: Length of the JSON text in bytes.
_HEADER = struct.Struct("<I")


@dataclass(frozen=True)
class KlArrays:
    """Datum of reverse KL: a continuation of `n` tokens, and the two contexts that it follows."""

    student_context: np.ndarray  # int64 [s], s >= 1
    reference_context: np.ndarray  # int64 [r], r >= 1
    targets: np.ndarray  # int64 [n], n >= 1
    weights: np.ndarray  # float32 [n]
    routed_experts: np.ndarray | None = None  # int16 [s + n - 1, layers, experts of a token]

    @property
    def student_tokens(self) -> np.ndarray:
        """Input tokens of the run. The last target is missing, because it is only predicted."""
        return np.concatenate([self.student_context, self.targets[:-1]])

    @property
    def reference_tokens(self) -> np.ndarray:
        """Input tokens of the reference."""
        return np.concatenate([self.reference_context, self.targets[:-1]])


@dataclass(frozen=True)
class ReverseKlBody:
    """Decoded reverse-KL request."""

    reference: WeightsRef | None  # weights of the reference; None: the base model alone
    temperature: float
    datums: tuple[KlArrays, ...]

    @property
    def num_tokens(self) -> int:
        """Input tokens of the run and of the reference, as counted by the token budget."""
        return sum(len(d.student_context) + len(d.reference_context) + 2 * (len(d.targets) - 1) for d in self.datums)


def encode_reverse_kl(body: ReverseKlBody) -> bytes:
    """Return a body as bytes. Equal bodies give equal bytes."""
    shapes = [
        [len(d.student_context), len(d.reference_context), len(d.targets)]
        + ([] if d.routed_experts is None else list(d.routed_experts.shape[1:]))
        for d in body.datums
    ]
    settings = {"reference": body.reference, "temperature": body.temperature, "shapes": shapes}
    text = json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()
    arrays = [
        np.asarray(array, dtype).tobytes()
        for d in body.datums
        for array, dtype in (
            (d.student_context, "<i4"),
            (d.reference_context, "<i4"),
            (d.targets, "<i4"),
            (d.weights, "<f4"),
            (() if d.routed_experts is None else d.routed_experts, "<i2"),
        )
    ]
    return b"".join([_HEADER.pack(len(text)), text, *arrays])


def decode_reverse_kl(body: bytes) -> ReverseKlBody:
    """Return the body of bytes from `encode_reverse_kl`, also of the next version during an upgrade. Raises
    MalformedBody: the bytes are not such a body.
    """
    try:
        (length,) = _HEADER.unpack_from(body)
        at = _HEADER.size + length
        settings = json.loads(body[_HEADER.size : at])
        datums = []
        for s, r, n, *each in settings["shapes"]:
            tokens = np.frombuffer(body, "<i4", s + r + n, at).astype(np.int64)
            at += 4 * (s + r + n)
            weights = np.frombuffer(body, "<f4", n, at)
            at += 4 * n
            experts = None
            if each:
                shape = (s + n - 1, *each)
                experts = np.frombuffer(body, "<i2", prod(shape), at).reshape(shape)
                at += experts.nbytes
            contexts = tokens[:s], tokens[s : s + r]
            datums.append(KlArrays(*contexts, tokens[s + r :], weights, experts))
        reference = settings["reference"]
        return ReverseKlBody(
            WeightsRef(reference) if reference is not None else None, float(settings["temperature"]), tuple(datums)
        )
    except (struct.error, ValueError, LookupError, TypeError) as broken:
        raise MalformedBody("The body of a reverse-KL request cannot be read.") from broken


def reverse_kl_answer(losses: Sequence[np.ndarray], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the result of a request, in the format that the `mint` SDK reads.

    For each datum, `loss` is the sum of its `losses`, and `token_losses` has the terms. `mint` 0.2.0 ignores the latter.
    """
    outputs = [
        {"loss": _tensor([float(each.sum(dtype=np.float64))]), "token_losses": _tensor(each.tolist())}
        for each in losses
    ]
    return {"outputs": outputs, "metrics": dict(metrics), "type": "mint_forward_backward_reverse_kl"}


def _tensor(data: list[float]) -> dict[str, Any]:
    return {"data": data, "shape": [len(data)], "dtype": "float32"}
