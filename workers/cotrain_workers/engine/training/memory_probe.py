"""Measurement of a micro-batch's memory on the device, and the choice of its size."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.device import free_host_bytes, is_out_of_memory
from cotrain_workers.engine.model.activation_checkpointing import CHUNK_ROWS, Choice
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.ops import Datum, Failure, Pass
from cotrain_workers.engine.routing import up_to
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.memory_model import (
    ActivationModel,
    Activations,
    Budget,
    budget,
    fit,
    kept_tokens,
    longest_datum,
    micro_batch_bytes,
)
from cotrain_workers.engine.training.micro_batches import PassesCost
from cotrain_workers.engine.training.pass_state import PassState


class NewForwardBackward(Protocol):
    """Factory of `ForwardBackward`."""

    def __call__(
        self, *, micro_batch_tokens: int, recompute: Choice, save_tokens: int = sys.maxsize
    ) -> ForwardBackward:
        """Return a new one."""


Peak = Callable[[Callable[[], bool]], int | None]

#: Value of "auto" on a CPU, whose memory has no fixed shares. Samples wait for the running
#: micro-batch. Larger ones train hardly faster there, smaller ones slower (figures in ADR 15).
CPU_TOKENS = 2048
PROBE_RANK = 16
#: Of the pass that runs first-use checks.
FIRST_LENGTH = 512


def size_micro_batches(
    base: BaseModel,
    new_forward_backward: NewForwardBackward,
    asked: int | Literal["auto"],
    choice: Choice,
    *,
    adapter_bytes: int,
) -> Budget:
    """Return the limits of a micro-batch; on CUDA they are measured, unless nothing is left to
    choose.

    Raises TooLittleMemory.
    """
    weight = base.head_weight
    device = weight.device
    unmeasured = 0 if choice == "always" else sys.maxsize
    if device.type != "cuda":
        return Budget(CPU_TOKENS if asked == "auto" else asked, unmeasured)
    taken = torch.cuda.memory_allocated(device)
    bank = AdapterBank(base.targets, device, weight.dtype)
    # Run first-use checks here and not within a checkpoint, which would record them.
    probe(
        new_forward_backward,
        bank,
        "never",
        vocab=base.vocab_size,
        length=FIRST_LENGTH,
        tokens=FIRST_LENGTH,
        needs_grad=False,
    )
    if asked != "auto" and choice != "auto":
        return Budget(asked, unmeasured)
    peak = partial(cuda_peak, device)
    found = measure(base, new_forward_backward, bank, peak)
    tower_bytes, feature_bytes = measure_tower(base, peak)
    found = found.with_images(feature_bytes)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    free_bytes = micro_batch_bytes(total, taken, adapter_bytes, tower_bytes)
    longest, save_tokens = longest_datum(
        found, micro_batch_bytes(total, taken, 0, tower_bytes), choice, host_tokens(base)
    )
    if asked == "auto":
        sized = budget(found, free_bytes, choice)
        return replace(sized, longest_datum=longest, save_tokens=save_tokens)
    return Budget(asked, kept_tokens(found, free_bytes, choice), longest, save_tokens)


def host_tokens(base: BaseModel) -> int:
    """Return the tokens whose layer inputs take half of the host's free memory."""
    token_bytes = base.kv.layers * base.hidden_size * base.head_weight.itemsize
    return free_host_bytes() // 2 // token_bytes


def measure(base: BaseModel, new_forward_backward: NewForwardBackward, bank: AdapterBank, peak: Peak) -> Activations:
    """Measure both ways to run a layer. From one head chunk on, the head's share is constant.

    The tokens are one sequence, if the model reads as many. A single one takes most memory: in
    deterministic backward FlashAttention 2 divides the sums of a few sequences over all
    multiprocessors, each part with an fp32 gradient of the queries.
    """
    chunk = new_forward_backward(micro_batch_tokens=1, recompute="never").head_chunk_rows
    lengths = [min(chunk * times, base.context_length) for times in (1, 2)]
    points = [up_to(chunk * times, length) for times, length in zip((1, 2), lengths, strict=True)]

    ask = partial(probe, new_forward_backward, bank, vocab=base.vocab_size)

    def line(choice: Choice) -> ActivationModel | None:
        runs = [
            partial(ask, choice, length=length, tokens=tokens) for tokens, length in zip(points, lengths, strict=True)
        ]
        runs[0]()  # libraries allocate their workspaces in the first call
        measured = [(tokens, peak(run)) for tokens, run in zip(points, runs, strict=True)]
        fitting = [(tokens, size) for tokens, size in measured if size is not None]
        return fit(fitting) if len(fitting) == len(points) else None

    def saving() -> ActivationModel | None:
        # Below these lengths, the constant memory of one chunk may be the peak.
        sizes = (8 * CHUNK_ROWS, 12 * CHUNK_ROWS)
        if sizes[-1] > base.context_length:
            return None
        runs = [partial(ask, "always", length=each, tokens=each, saves=True) for each in sizes]
        measured = [(each, peak(run)) for each, run in zip(sizes, runs, strict=True)]
        fitting = [(tokens, size) for tokens, size in measured if size is not None]
        return fit(fitting) if len(fitting) == len(sizes) else None

    return Activations(kept=line("never"), recomputed=line("always"), saving=saving())


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
    choice: Choice,
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
        micro_batch_tokens=tokens - saves, recompute=choice, save_tokens=0 if saves else sys.maxsize
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
