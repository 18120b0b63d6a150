"""Bodies of ops in the format of the API."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from cotrain.wire.proto import wire_pb2


def pass_body(
    run: str,
    seq: int,
    sequences: Sequence[Sequence[int]],
    *,
    loss_fn: str = "cross_entropy",
    forward_only: bool = False,
    weight: float = 1.0,
    policy_step: int | None = None,
) -> bytes:
    """Write a next-token request: each sequence of n+1 tokens is a datum of n."""
    request = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn=loss_fn, forward_only=forward_only)
    for sequence in sequences:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(sequence[:-1], "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = (wire_pb2.DTYPE_INT64, np.asarray(sequence[1:], "<i8").tobytes())
        weights = datum.loss_fn_inputs["weights"]
        weights.dtype = wire_pb2.DTYPE_FLOAT32
        weights.dense = np.full(len(sequence) - 1, weight, "<f4").tobytes()
        if policy_step is not None:
            steps = datum.loss_fn_inputs["policy_step"]
            steps.dtype, steps.dense = wire_pb2.DTYPE_INT64, np.full(len(sequence) - 1, policy_step, "<i8").tobytes()
    return request.SerializeToString(deterministic=True)


def optim_body(lr: float, optimizer: str = "adamw") -> bytes:
    """Write an optimizer step."""
    params = {"type": optimizer, "learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
              "weight_decay": 0.0, "grad_clip_norm": 0.0}  # fmt: skip
    return json.dumps(params).encode()


def sequences(seed: int, count: int, length: int, vocab: int = 512) -> list[list[int]]:
    """Draw `count` sequences of `length` + 1 tokens."""
    rng = np.random.default_rng(seed)
    drawn: list[list[int]] = rng.integers(0, vocab, (count, length + 1)).tolist()
    return drawn
