"""How many tokens one micro-batch may hold: a measured line of bytes over tokens, and pure arithmetic.

Knows no device. `memory_probe.py` measures, `Engine.load` asks.

What becomes of a micro-batch that did not fit into memory. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotrain_workers.engine.model.activation_checkpointing import Choice
from cotrain_workers.engine.training.micro_batches import MicroBatch

#: Larger micro-batches make a GPU no faster (Qwen3-8B: the weights are read in 1 % of the time already).
MAX_TOKENS = 32_768
#: So many without recomputing are enough. By calculation for Qwen3-8B on an H200 (S = 2,048): to read the
#: weights for each 4,096 tokens takes 5 % of their time, and less while products run; a second forward 31 %.
ENOUGH_TOKENS = 4096
LEAST_TOKENS = 256
#: Of what the base model leaves: key-value memory takes a quarter (`kv_cache.py`), CUDA 2 GB for itself.
KV_SHARE, OWN_BYTES = 0.25, 2 * 10**9
#: A micro-batch stacks its adapters' weights in 16 bits (`lora/grouped.py`): of the 16 bytes that each parameter has on
#: the device (weights, gradient, m, v) two more, if all that are there are in it, and more where ranks are padded.
STACKED_SHARE = 1 / 8
#: A line through two points says nothing of fragments, of workspaces and of ragged lengths.
MARGIN = 0.95


class TooLittleMemory(ValueError):
    """The device has no room for a micro-batch of the base model; the message says how much it takes."""


@dataclass(frozen=True)
class ActivationModel:
    """Bytes above what an idle engine holds, at the peak of a micro-batch of `T` tokens."""

    fixed_bytes: float
    bytes_per_token: float

    def tokens_in(self, free_bytes: float) -> int:
        """Return how many tokens fit, below zero if not even what is fixed does."""
        return int((free_bytes - self.fixed_bytes) // self.bytes_per_token)


@dataclass(frozen=True)
class Activations:
    """The two ways to run a decoder layer."""

    kept: ActivationModel | None  # None: not even the probe fitted
    recomputed: ActivationModel | None


@dataclass(frozen=True)
class Budget:
    """What a micro-batch may hold."""

    tokens: int
    keep_tokens: int
    """Beyond so many, its decoder layers are recomputed; 0: always."""


def fit(measured: Sequence[tuple[int, int]]) -> ActivationModel:
    """Put a line through two points (tokens, bytes).

    Raises ValueError if they do not grow: something else has used the device in between.
    """
    (tokens, few), (more_tokens, many) = measured
    if not (more_tokens > tokens and many > few):
        raise ValueError(f"Memory does not grow with the tokens of a micro-batch: {measured}.")
    slope = (many - few) / (more_tokens - tokens)
    return ActivationModel(max(0.0, few - slope * tokens), slope)


def micro_batch_bytes(device_bytes: int, taken_bytes: int, adapter_bytes: int) -> int:
    """Return what micro-batches may plan with on a device of which the base model takes `taken_bytes`.

    By all memory instead of the free: sizes move bits, so that a restart has to find the same.
    """
    left = device_bytes - taken_bytes - OWN_BYTES
    return int((left * (1 - KV_SHARE) - adapter_bytes * (1 + STACKED_SHARE)) * MARGIN)


def budget(activations: Activations, free_bytes: int, choice: Choice) -> Budget:
    """Choose the size of a micro-batch that is to take `free_bytes` at most.

    Recomputing is chosen only where fewer than ENOUGH_TOKENS fit without. Raises TooLittleMemory.
    """
    kept = rounded(kept_tokens(activations, free_bytes, choice))
    if choice == "never" or kept >= ENOUGH_TOKENS:
        return Budget(enough(kept, activations.kept, free_bytes), kept)
    recomputed = activations.recomputed
    fitting = recomputed.tokens_in(free_bytes) if recomputed else 0
    # Recomputed, a micro-batch gains nothing by being larger than what would do without.
    tokens = min(rounded(fitting), ENOUGH_TOKENS)
    return Budget(enough(tokens, recomputed, free_bytes), kept)


def kept_tokens(activations: Activations, free_bytes: int, choice: Choice) -> int:
    """Return how many tokens fit without recomputing; 0 where all is to be recomputed."""
    if choice == "always" or activations.kept is None:
        return 0
    return max(0, activations.kept.tokens_in(free_bytes))


def rounded(tokens: int) -> int:
    """Round down to few sizes, far apart: another measurement on the same hardware shall give the same."""
    steps = [LEAST_TOKENS, 512, 768]
    step = 1024
    while step <= MAX_TOKENS:
        steps += [step, step + step // 2]
        step *= 2
    return max((size for size in steps if size <= min(tokens, MAX_TOKENS)), default=0)


def enough(tokens: int, model: ActivationModel | None, free_bytes: int) -> int:
    """Return `tokens`, or raise TooLittleMemory."""
    if tokens >= LEAST_TOKENS:
        return tokens
    if model is None:
        raise TooLittleMemory(
            "Not even the micro-batch that measures memory fits next to the base model."
        )
    needed = model.fixed_bytes + LEAST_TOKENS * model.bytes_per_token
    raise TooLittleMemory(
        f"A micro-batch of {LEAST_TOKENS} tokens takes {needed / 1e9:.2f} GB; "
        f"{free_bytes / 1e9:.2f} GB next to the base model, adapters and key-value memory."
    )


@dataclass(frozen=True)
class Recompute:
    """It runs again, its decoder layers computed a second time in backward."""


@dataclass(frozen=True)
class Fail:
    """The op of its only datum fails; the datum has so many tokens."""

    tokens: int


@dataclass(frozen=True)
class Split:
    """Both halves run, one after the other."""

    first: MicroBatch
    second: MicroBatch
    cuts_slice: bool
    """Whether one slice of an op became two, which moves the last bits of the op's sums."""


def after_oom(
    batch: MicroBatch, lengths: Sequence[int], *, can_recompute: bool
) -> Recompute | Fail | Split:
    """Choose what loses least; `lengths` are of the datums of the batch's first slice.

    While slices stay as they are, the sums are the same to the bit. A slice that does not fit alone is
    recomputed in backward, if it can be, and only then cut at a datum.
    """
    op_slice, *others = batch.op_slices
    if others:
        return Split(*batch.halves(), cuts_slice=False)
    if can_recompute and op_slice.needs_grad:
        return Recompute()
    if len(lengths) == 1:
        return Fail(op_slice.tokens)
    first, second = (replace(batch, op_slices=(half,)) for half in op_slice.halves(lengths))
    return Split(first, second, cuts_slice=True)
