"""Size of micro-batches: measured on the device, by two lines of bytes over tokens.

`size_micro_batches` runs two pairs of probe passes for each way to compute a layer. One line is that of the head's
chunk, and the other one that of the layers; the larger one counts. The model itself is pure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal

import numpy as np
import torch

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.device import is_out_of_memory
from cotrain_workers.engine.host import free_host_bytes
from cotrain_workers.engine.model.activation_checkpointing import CHUNK_ROWS, RecomputePolicy
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.ops import Datum, Failure, Pass
from cotrain_workers.engine.routing import up_to
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.micro_batches import Budget, PassesCost
from cotrain_workers.engine.training.pass_state import PassState

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
#: Value of "auto" on a CPU, whose memory has no fixed shares. Samples wait for the running
#: micro-batch. Larger ones train hardly faster there, smaller ones slower (figures in ADR 15).
CPU_TOKENS = 2048
#: Shares of the memory next to the base model: key-value memory takes a quarter (`kv_cache.py`),
#: CUDA 2 GB.
KV_SHARE, OWN_BYTES = 0.25, 2 * 10**9
#: Gradients of earlier slices are copied before each micro-batch, so that it can be undone. That
#: takes 4 of the 18 bytes of each parameter, if all adapters have earlier slices.
UNDO_SHARE = 4 / 18
#: Margin for fragments, workspaces and ragged lengths, which a line through two points does not
#: cover.
MARGIN = 0.95
#: Largest share of the memory for micro-batches that is left free for the vision tower. An image that needs more fails
#: alone.
TOWER_SHARE = 0.25
PROBE_RANK = 16
#: Ratio of the head's chunk to one that takes less memory than the layers, with any vocabulary.
SMALL_CHUNKS = 32
#: Tokens of the pass that runs first-use checks.
FIRST_LENGTH = 512


class TooLittleMemory(ValueError):
    """Error: the device has no memory for a micro-batch of the base model. The message states the size."""


#: Constructor of `ForwardBackward` for one base model and one LoRA backend.
NewForwardBackward = Callable[..., ForwardBackward]
#: Return the peak bytes of a function above the current use; None if it did not fit.
Peak = Callable[[Callable[[], bool]], int | None]


def size_micro_batches(
    base: BaseModel,
    new_forward_backward: NewForwardBackward,
    asked: int | Literal["auto"],
    policy: RecomputePolicy,
    *,
    adapter_bytes: int,
) -> Budget:
    """Return the limits of a micro-batch. On CUDA they are measured, unless both are configured.

    Raises TooLittleMemory.
    """
    weight = base.head_weight
    device = weight.device
    unmeasured = 0 if policy == "always" else sys.maxsize
    if device.type != "cuda":
        return Budget(CPU_TOKENS if asked == "auto" else asked, unmeasured)
    taken = torch.cuda.memory_allocated(device)
    bank = AdapterBank(base.targets, device, weight.dtype)
    # Run first-use checks here and not within a checkpoint, which would record them.
    first_use = partial(probe, new_forward_backward, bank, "never", vocab=base.vocab_size, needs_grad=False)
    first_use(length=FIRST_LENGTH, tokens=FIRST_LENGTH)
    if asked != "auto" and policy != "auto":
        return Budget(asked, unmeasured)
    peak = partial(cuda_peak, device)
    found = measure(base, new_forward_backward, bank, peak)
    tower_bytes, feature_bytes = measure_tower(base, peak)
    found = found.with_images(feature_bytes)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    free_bytes = micro_batch_bytes(total, taken, adapter_bytes, tower_bytes)
    longest, save_tokens = longest_datum(
        found, micro_batch_bytes(total, taken, 0, tower_bytes), policy, host_tokens(base)
    )
    if asked == "auto":
        sized = budget(found, free_bytes, policy)
        return replace(sized, longest_datum=longest, save_tokens=save_tokens)
    return Budget(asked, kept_tokens(found, free_bytes, policy), longest, save_tokens)


def micro_batch_bytes(device_bytes: int, taken_bytes: int, adapter_bytes: int, tower_bytes: int = 0) -> int:
    """Return the bytes for micro-batches on a device of which the base model takes `taken_bytes`.

    The vision tower takes `tower_bytes` for the largest image, while passes of long data are in progress. The result is
    based on all memory instead of the free memory: sizes move bits, so a restart must find the same size.
    """
    left = device_bytes - taken_bytes - OWN_BYTES
    adapters = adapter_bytes * (1 + UNDO_SHARE)
    free = (left * (1 - KV_SHARE) - adapters) * MARGIN
    return int(free - min(tower_bytes, max(0.0, free) * TOWER_SHARE))


def host_tokens(base: BaseModel) -> int:
    """Return the tokens whose layer inputs take half of the host's free memory."""
    token_bytes = base.kv.layers * base.hidden_size * base.head_weight.itemsize
    return free_host_bytes() // 2 // token_bytes


def measure(base: BaseModel, new_forward_backward: NewForwardBackward, bank: AdapterBank, peak: Peak) -> Activations:
    """Measure each way to run a layer.

    The tokens are one sequence, if the model reads as many. A single one takes most memory: in deterministic backward
    FlashAttention 2 divides the sums of a few sequences over all multiprocessors, each part with an fp32 gradient of
    the queries.
    """
    chunk = new_forward_backward(micro_batch_tokens=1, recompute="never").head_chunk_rows
    short = [chunk, 2 * chunk]
    # Below these lengths of a datum that saves memory, the constant memory of one chunk of an MLP may be the peak.
    long = [8 * CHUNK_ROWS, 12 * CHUNK_ROWS]

    def line(sizes: Sequence[int], chunk_rows: int, policy: RecomputePolicy, *, saves: bool) -> Line | None:
        new = partial(new_forward_backward, head_chunk_rows=chunk_rows)
        measured: list[tuple[int, int]] = []
        for size in sizes:
            length = min(size, base.context_length)
            tokens = up_to(size, length)
            run = partial(probe, new, bank, policy, vocab=base.vocab_size, length=length, tokens=tokens, saves=saves)
            if not measured and not saves:
                run()  # libraries allocate their workspaces in the first call
            if (peak_bytes := peak(run)) is None:
                return None
            measured.append((tokens, peak_bytes))
        return fit(measured)

    def model(sizes: Sequence[int], policy: RecomputePolicy, *, saves: bool = False) -> ActivationModel | None:
        # From one chunk on, the head's share hardly grows. With far smaller chunks, the peak is in the layers.
        head = line(sizes, chunk, policy, saves=saves)
        layers = line(sizes, max(1, chunk // SMALL_CHUNKS), policy, saves=saves)
        return ActivationModel(head, layers) if head and layers else None

    saving = model(long, "always", saves=True) if long[-1] <= base.context_length else None
    return Activations(kept=model(short, "never"), recomputed=model(short, "always"), saving=saving)


def measure_tower(base: BaseModel, peak: Peak) -> tuple[int, float]:
    """Return the peak bytes of the vision tower for the largest image, and the bytes of its results for each token.

    If no memory is left for the largest image, it is the largest of a half, a quarter, … of its tokens. (0, 0.0): no tower.
    """
    if base.vision is None:
        return 0, 0.0
    vision, tokens, found = base.vision, base.context_length, torch.empty(0)

    def run() -> bool:
        nonlocal found
        try:
            found = vision.compute_blank(tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    while (peak_bytes := peak(run)) is None and tokens > 1:
        tokens //= 2
    return peak_bytes or 0, found.nbytes / max(1, found.shape[-2])


def probe(
    new_forward_backward: NewForwardBackward,
    bank: AdapterBank,
    policy: RecomputePolicy,
    *,
    vocab: int,
    length: int,
    tokens: int,
    needs_grad: bool = True,
    saves: bool = False,
) -> bool:
    """Run one pass of `tokens` with an adapter on every module; return True if it fitted at once.

    With `saves`, it is a long datum that saves memory.
    """
    ids = np.arange(length) % vocab  # equal tokens would all go to the same experts
    datum = Datum(ids, {"target_tokens": ids, "weights": np.ones(length, np.float32)})
    datums = [datum] * (tokens // length)
    op = Pass("probe", 1, datums, "cross_entropy", {}, needs_grad=needs_grad)
    adapter = bank.create("probe", AdapterSpec(PROBE_RANK, seed=0))
    forward_backward = new_forward_backward(
        micro_batch_tokens=tokens - saves, recompute=policy, save_tokens=0 if saves else sys.maxsize
    )
    state, cost = PassState(op, adapter), PassesCost()
    try:
        run_to_end(forward_backward.run([state], cost))
        return cost.halvings == 0 and not isinstance(state.output, Failure)
    finally:
        bank.drop("probe")


def cuda_peak(device: torch.device, run: Callable[[], bool]) -> int | None:
    """Return the peak bytes of `run` above the current use; None if it did not fit."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if not run():
        return None
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class Line:
    """Bytes of a micro-batch as a line in its tokens."""

    fixed_bytes: float
    bytes_per_token: float

    def bytes_of(self, tokens: int) -> float:
        """Return the bytes of a micro-batch of `tokens`."""
        return self.fixed_bytes + tokens * self.bytes_per_token

    def tokens_in(self, free_bytes: float) -> int:
        """Return how many tokens fit; negative if not even the fixed part fits."""
        return int((free_bytes - self.fixed_bytes) // self.bytes_per_token)

    def with_bytes(self, bytes_per_token: float) -> Line:
        """Return the line of tokens that take more bytes each."""
        return replace(self, bytes_per_token=self.bytes_per_token + bytes_per_token)


@dataclass(frozen=True)
class ActivationModel:
    """Peak bytes of a micro-batch, above an idle engine.

    The peak is in a chunk of the head in small micro-batches, and in the layers in large ones. With Qwen3-8B and
    recomputed layers, a token adds 0.32 MB to the head's bytes and 0.51 MB to those of the layers. The lines meet
    at 8,000 tokens.
    """

    head: Line
    layers: Line

    def bytes_of(self, tokens: int) -> float:
        """Return the peak bytes of a micro-batch of `tokens`."""
        return max(self.head.bytes_of(tokens), self.layers.bytes_of(tokens))

    def tokens_in(self, free_bytes: float) -> int:
        """Return how many tokens fit; negative if not even the fixed part fits."""
        return min(self.head.tokens_in(free_bytes), self.layers.tokens_in(free_bytes))

    def with_bytes(self, bytes_per_token: float) -> ActivationModel:
        """Return the model of tokens that take more bytes each."""
        return ActivationModel(self.head.with_bytes(bytes_per_token), self.layers.with_bytes(bytes_per_token))


@dataclass(frozen=True)
class Activations:
    """Models of the two ways to run a decoder layer."""

    kept: ActivationModel | None  # None: the probe itself did not fit
    recomputed: ActivationModel | None
    saving: ActivationModel | None = None
    """Recomputed layers, with their inputs on the host and their MLPs in chunks of rows."""

    def with_images(self, bytes_per_token: float) -> Activations:
        """Return the models of rows in which each token belongs to an image and has `bytes_per_token` of results."""
        models = (self.kept, self.recomputed, self.saving)
        return Activations(*(each and each.with_bytes(bytes_per_token) for each in models))


def fit(measured: Sequence[tuple[int, int]]) -> Line:
    """Fit a line through two points (tokens, bytes).

    Raises ValueError if the bytes do not grow, because something else has used the device in
    between.
    """
    (tokens, few), (more_tokens, many) = measured
    if not (more_tokens > tokens and many > few):
        raise ValueError(f"Memory does not grow with the tokens of a micro-batch: {measured}.")
    slope = (many - few) / (more_tokens - tokens)
    return Line(max(0.0, few - slope * tokens), slope)


def budget(activations: Activations, free_bytes: int, policy: RecomputePolicy) -> Budget:
    """Choose the faster way to run micro-batches of at most `free_bytes`, and their size.

    Raises TooLittleMemory.
    """
    kept = rounded(kept_tokens(activations, free_bytes, policy))
    model = activations.recomputed
    recomputed = min(rounded(model.tokens_in(free_bytes)), ENOUGH_TOKENS) if model else 0
    if policy == "never" or kept_is_faster(kept, recomputed):
        return Budget(enough(kept, activations.kept, free_bytes), kept)
    return Budget(enough(recomputed, model, free_bytes), kept)


def longest_datum(
    activations: Activations, free_bytes: int, policy: RecomputePolicy, host_tokens: int = 0
) -> tuple[int, int]:
    """Return the tokens of the longest datum in `free_bytes`, and the length above which a datum must save memory.

    The host has memory for the layer inputs of `host_tokens`. A datum is recomputed if possible. (0, sys.maxsize): not
    measured.
    """
    model = activations.kept if policy == "never" else activations.recomputed
    plain = max(0, model.tokens_in(free_bytes)) if model else 0
    if policy == "never" or activations.saving is None:
        return plain, sys.maxsize
    saving = min(activations.saving.tokens_in(free_bytes), host_tokens)
    # The length moves bits, so another measurement on the same hardware must yield it.
    return (saving, stepped(plain)) if saving > plain else (plain, sys.maxsize)


def stepped(tokens: int) -> int:
    """Round down to a power of two, or to one and a half of it."""
    step = 1 << max(0, tokens.bit_length() - 1)
    return step + step // 2 if tokens >= step + step // 2 else step


def kept_is_faster(kept: int, recomputed: int) -> bool:
    """Return True if micro-batches of `kept` tokens, with all layers kept, take less time per token than recomputed
    ones of `recomputed` tokens.
    """
    return kept > 0 and time_of_token(kept) <= RECOMPUTED_TIME * time_of_token(recomputed)


def time_of_token(tokens: int) -> float:
    """Return the time of a token in a micro-batch of `tokens`, relative to a large one's."""
    filled = tokens - UNFILLED_TOKENS
    return 1 + FIXED_TOKENS / filled if filled > 0 else inf


def kept_tokens(activations: Activations, free_bytes: int, policy: RecomputePolicy) -> int:
    """Return how many tokens fit without recomputing; 0 with "always"."""
    if policy == "always" or activations.kept is None:
        return 0
    return max(0, activations.kept.tokens_in(free_bytes))


def rounded(tokens: int) -> int:
    """Round down to one of few distant sizes, so that another measurement on the same hardware yields the same."""
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
    raise TooLittleMemory(
        f"A micro-batch of {LEAST_TOKENS} tokens takes {model.bytes_of(LEAST_TOKENS) / 1e9:.2f} GB; "
        f"{free_bytes / 1e9:.2f} GB next to the base model, adapters and key-value memory."
    )
