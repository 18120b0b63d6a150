"""Size of micro-batches: a linear model of bytes over tokens, and the handling of running out of
memory. Pure.

It does not depend on a device: `memory_probe.py` measures, and `Engine.load` applies the model.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from cotrain_workers.engine.model.activation_checkpointing import Choice
from cotrain_workers.engine.training.micro_batches import MicroBatch

#: Larger micro-batches make a GPU no faster (Qwen3-8B: the weights are read in 1 % of the time
#: already).
MAX_TOKENS = 32_768
#: Size of recomputed micro-batches, if it fits. By calculation for Qwen3-8B on an H200 (S = 2,048),
#: reading the weights for each 4,096 tokens takes 5 % of their time, and less while products run.
ENOUGH_TOKENS = 4096
#: Time of a recomputed token over that of a kept one, by FLOP of Qwen3-8B at S = 2,048
#: (`bench/support/roofline.py`). Frozen weights have no gradient, so it is more than 4/3.
RECOMPUTED_TIME = 1.44
#: Fixed time of a micro-batch, in tokens. LoRA's narrow products take at least 316 us in a layer of
#: an 8B model on an H200, and a token 1.7 us (`bench/results/kernels-h200-20261126-033738.json`).
FIXED_TOKENS = 184
#: Mean number of rows left free because the next sequence is longer: half of one of 512 tokens.
UNFILLED_TOKENS = 256
LEAST_TOKENS = 256
#: Shares of the memory next to the base model: key-value memory takes a quarter (`kv_cache.py`),
#: CUDA 2 GB.
KV_SHARE, OWN_BYTES = 0.25, 2 * 10**9
#: A micro-batch stacks its adapters' weights in 16 bits (`lora/grouped.py`). Each parameter has 16
#: bytes on the device (weights, gradient, m, v). Stacking adds two more if all adapters are in the
#: batch, and more where ranks are padded.
STACKED_SHARE = 1 / 8
#: Gradients of earlier slices are copied before each micro-batch, so that it can be undone. That
#: takes 4 of the 18 bytes of each parameter, if all adapters have earlier slices.
UNDO_SHARE = 4 / 18
#: Margin for fragments, workspaces and ragged lengths, which a line through two points does not
#: cover.
MARGIN = 0.95
#: Largest share of the memory for micro-batches that is left free for the vision tower. An image that needs more fails
#: alone.
TOWER_SHARE = 0.25
#: Waves of passes without a failure after which lowered limits double. Each further failure doubles
#: the number, up to the second one. A retry costs at most one micro-batch.
FIRST_WAIT, LONGEST_WAIT = 16, 1024


class TooLittleMemory(ValueError):
    """Error: the device has no memory for a micro-batch of the base model. The message states the size."""


@dataclass(frozen=True)
class ActivationModel:
    """Peak bytes of a micro-batch of `T` tokens, above an idle engine."""

    fixed_bytes: float
    bytes_per_token: float

    def tokens_in(self, free_bytes: float) -> int:
        """Return how many tokens fit; negative if not even the fixed part fits."""
        return int((free_bytes - self.fixed_bytes) // self.bytes_per_token)


@dataclass(frozen=True)
class Activations:
    """Models of the two ways to run a decoder layer."""

    kept: ActivationModel | None  # None: the probe itself did not fit
    recomputed: ActivationModel | None
    saving: ActivationModel | None = None
    """Recomputed layers, with their inputs on the host and their MLPs in chunks of rows."""

    def with_images(self, bytes_per_token: float) -> "Activations":
        """Return the models of rows in which each token belongs to an image and has `bytes_per_token` of results."""
        models = (
            each and replace(each, bytes_per_token=each.bytes_per_token + bytes_per_token)
            for each in (self.kept, self.recomputed, self.saving)
        )
        return Activations(*models)


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch."""

    tokens: int
    keep_tokens: int  # number of tokens above which decoder layers are recomputed; 0: always
    longest_datum: int = 0  # tokens, if every adapter is offloaded; 0: not measured
    save_tokens: int = sys.maxsize
    """Tokens of a long datum above which layer inputs are on the host, and MLPs compute in chunks of rows."""


@dataclass
class BatchLimits:
    """Limits of micro-batches in use. They fall when memory runs out, and later return to the
    planned ones.

    No run's bits depend on them, because they only decide which slices run together, and whether
    layers are recomputed.
    """

    planned: Budget
    tokens: int = field(init=False)
    keep_tokens: int = field(init=False)
    save_tokens: int = field(init=False)
    wait: int = 0
    """Waves without a failure until the limits double; 0 if memory has not run out recently."""
    _good: int = 0
    _has_failed: bool = False  # in this wave

    def __post_init__(self) -> None:
        self.tokens, self.keep_tokens = self.planned.tokens, self.planned.keep_tokens
        self.save_tokens = self.planned.save_tokens

    def recomputes(self, padded_tokens: int) -> bool:
        """Return True if a micro-batch of this size recomputes its decoder layers."""
        return padded_tokens > self.keep_tokens

    def saves_memory(self, tokens: int) -> bool:
        """Return True if a datum of this length has its layer inputs on the host, and its MLPs in chunks of rows."""
        return tokens > self.save_tokens

    def lower(self, *, tokens: int = sys.maxsize, keep_tokens: int = sys.maxsize) -> None:
        """Lower limits after a micro-batch ran out of memory."""
        self.tokens = min(self.tokens, tokens)
        self.keep_tokens = min(self.keep_tokens, keep_tokens)
        self._has_failed = True

    def lower_plan(self, *, tokens: int, keep_tokens: int = sys.maxsize) -> None:
        """Lower limits for good, because the next failure could end the process."""
        self.tokens = min(self.tokens, tokens)
        self.keep_tokens = min(self.keep_tokens, keep_tokens)
        most = self.planned
        self.planned = Budget(min(most.tokens, tokens), min(most.keep_tokens, keep_tokens))

    def end_wave(self) -> None:
        """Count a wave of passes; double lowered limits after enough waves without a failure."""
        if self._has_failed:
            self._has_failed, self._good = False, 0
            self.wait = min(2 * self.wait, LONGEST_WAIT) or FIRST_WAIT
            return
        self._good += 1
        if self._good < self.wait:
            return
        self._good = 0
        most = self.planned
        if (self.tokens, self.keep_tokens) == (most.tokens, most.keep_tokens):
            self.wait = 0
            return
        self.tokens = min(2 * self.tokens, most.tokens)
        # Keeping any micro-batch means no limit, which doubling would not reach.
        more = 2 * self.keep_tokens + 1
        self.keep_tokens = min(more, most.keep_tokens) if more < most.tokens else most.keep_tokens


def fit(measured: Sequence[tuple[int, int]]) -> ActivationModel:
    """Fit a line through two points (tokens, bytes).

    Raises ValueError if the bytes do not grow, because something else has used the device in
    between.
    """
    (tokens, few), (more_tokens, many) = measured
    if not (more_tokens > tokens and many > few):
        raise ValueError(f"Memory does not grow with the tokens of a micro-batch: {measured}.")
    slope = (many - few) / (more_tokens - tokens)
    return ActivationModel(max(0.0, few - slope * tokens), slope)


def micro_batch_bytes(device_bytes: int, taken_bytes: int, adapter_bytes: int, tower_bytes: int = 0) -> int:
    """Return the bytes for micro-batches on a device of which the base model takes `taken_bytes`.

    The vision tower takes `tower_bytes` for the largest image, while passes of long data are in progress. It is based on all memory instead of the free memory: sizes move bits, so a restart must find
    the same size.
    """
    left = device_bytes - taken_bytes - OWN_BYTES
    adapters = adapter_bytes * (1 + STACKED_SHARE + UNDO_SHARE)
    free = (left * (1 - KV_SHARE) - adapters) * MARGIN
    return int(free - min(tower_bytes, max(0.0, free) * TOWER_SHARE))


def budget(activations: Activations, free_bytes: int, choice: Choice) -> Budget:
    """Choose the faster way to run micro-batches of at most `free_bytes`, and their size.

    Raises TooLittleMemory.
    """
    kept = rounded(kept_tokens(activations, free_bytes, choice))
    model = activations.recomputed
    recomputed = min(rounded(model.tokens_in(free_bytes)), ENOUGH_TOKENS) if model else 0
    if choice == "never" or kept_is_faster(kept, recomputed):
        return Budget(enough(kept, activations.kept, free_bytes), kept)
    return Budget(enough(recomputed, model, free_bytes), kept)


def longest_datum(activations: Activations, free_bytes: int, choice: Choice, host_tokens: int = 0) -> tuple[int, int]:
    """Return the tokens of the longest datum in `free_bytes`, and the length above which a datum must save memory.

    The host has memory for the layer inputs of `host_tokens`. A datum is recomputed if possible. (0, sys.maxsize): not
    measured.
    """
    model = activations.kept if choice == "never" else activations.recomputed
    plain = max(0, model.tokens_in(free_bytes)) if model else 0
    if choice == "never" or activations.saving is None:
        return plain, sys.maxsize
    saving = min(activations.saving.tokens_in(free_bytes), host_tokens)
    # The length moves bits, so another measurement on the same hardware must yield it.
    return (saving, stepped(plain)) if saving > plain else (plain, sys.maxsize)


def stepped(tokens: int) -> int:
    """Round down to a power of two, or to one and a half of it."""
    step = 1 << max(0, tokens.bit_length() - 1)
    return step + step // 2 if tokens >= step + step // 2 else step


def kept_is_faster(kept: int, recomputed: int) -> bool:
    """Return True if micro-batches of `kept` tokens that keep all layers take less time per token
    than recomputed ones of `recomputed` tokens.
    """
    return kept > 0 and time_of_token(kept) <= RECOMPUTED_TIME * time_of_token(recomputed)


def time_of_token(tokens: int) -> float:
    """Return the time of a token in a micro-batch of `tokens`, relative to a large one's."""
    filled = tokens - UNFILLED_TOKENS
    return 1 + FIXED_TOKENS / filled if filled > 0 else inf


def kept_tokens(activations: Activations, free_bytes: int, choice: Choice) -> int:
    """Return how many tokens fit without recomputing; 0 with "always"."""
    if choice == "always" or activations.kept is None:
        return 0
    return max(0, activations.kept.tokens_in(free_bytes))


def rounded(tokens: int) -> int:
    """Round down to one of few distant sizes, so that another measurement on the same hardware
    yields the same size.
    """
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
        raise TooLittleMemory("Not even the micro-batch that measures memory fits next to the base model.")
    needed = model.fixed_bytes + LEAST_TOKENS * model.bytes_per_token
    raise TooLittleMemory(
        f"A micro-batch of {LEAST_TOKENS} tokens takes {needed / 1e9:.2f} GB; "
        f"{free_bytes / 1e9:.2f} GB next to the base model, adapters and key-value memory."
    )


@dataclass(frozen=True)
class Recompute:
    """Run the micro-batch again, with decoder layers recomputed in backward."""


@dataclass(frozen=True)
class SaveMemory:
    """Run the datum again, with layer inputs on the host and MLPs in chunks of rows."""


@dataclass(frozen=True)
class Fail:
    """Fail the op of the only datum, which has `tokens` tokens."""

    tokens: int


@dataclass(frozen=True)
class Split:
    """Run both halves, one after the other."""

    first: MicroBatch
    second: MicroBatch
    cuts_slice: bool  # True if a slice of an op was cut, which moves the last bits of the op's sums


def after_oom(
    batch: MicroBatch,
    lengths: Sequence[int],
    shared: Sequence[int] = (),
    *,
    can_recompute: bool,
    can_save: bool = False,
) -> Recompute | SaveMemory | Fail | Split:
    """Choose the remedy that loses least; `lengths` and `shared` are of the datums of the batch's first slice.

    While slices stay whole, the sums are the same to the bit. A slice that does not fit alone is
    recomputed in backward if possible, and only then cut at a datum.
    """
    op_slice, *others = batch.op_slices
    if others:
        return Split(*batch.halves(), cuts_slice=False)
    if can_recompute and op_slice.needs_grad:
        return Recompute()
    if len(lengths) == 1:
        return SaveMemory() if can_save else Fail(op_slice.tokens)
    first, second = (replace(batch, op_slices=(half,)) for half in op_slice.halves(lengths, shared))
    return Split(first, second, cuts_slice=True)
