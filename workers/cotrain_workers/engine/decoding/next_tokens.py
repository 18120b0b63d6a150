"""Next tokens of ready sequences, chosen on the device and read by the host when the copy is complete.

A token is drawn with temperature, top-k, top-p and one uniform number. The draw inverts the cumulative distribution in
integers, whose sums are exact in any order. The result is therefore equal on CPU and with CUDA's deterministic
algorithms (which lack a cumulative sum of floats), in any batch.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.adapters.copies import CopyStream, HostArenas, carry_out
from cotrain_workers.engine.decoding.model_runner import ForwardResult
from cotrain_workers.engine.decoding.sequence import SequenceState
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.decoding.step import SlotOf, slot_order
from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.model.unembedding import likeliest, picked_logprobs

UNIT = 2.0**40  # probability 1; probabilities below 1 / UNIT are never drawn
ROWS = 64  # per call: the cumulative sums of a row take 8 bytes per token of the vocabulary

# (hidden states [n, d], slots) -> logits [n padded, V]
Logits = Callable[[torch.Tensor, list[Slot | None]], torch.Tensor]


class DrawParams(NamedTuple):
    """Sampling parameters of the next token of one row."""

    temperature: float  # 0: the most probable token, the lowest id among equals
    top_k: int  # below 1: off
    top_p: float
    uniform: float  # in [0, 1)


class Ready(NamedTuple):
    """Sequences that are due a token, sorted by adapter, and their hidden states `[n, d]`."""

    sequences: list[SequenceState]
    hidden: torch.Tensor


class TopTokens(NamedTuple):
    """The `k` most probable tokens of the sequences that request as many."""

    sequences: Sequence[SequenceState]
    k: int
    ids: torch.Tensor  # int32 [n, k]
    logprobs: torch.Tensor  # float32 [n, k]


class Read(NamedTuple):
    """Token chosen for one sequence."""

    sequence: SequenceState
    token: int
    logprob: float
    top: tuple[np.ndarray, np.ndarray] | None  # int32 and float32 `[k]`


@dataclass(frozen=True)
class NextTokens:
    """One token for each of some sequences, on the device and being copied to the host."""

    sequences: Sequence[SequenceState]
    tokens: torch.Tensor  # int64 [n], on the device
    _tops: Sequence[TopTokens]
    _on_host: HostArenas

    @property
    def is_wanted(self) -> bool:
        """True if any of the sequences still waits for its token."""
        return any(sequence.unread for sequence in self.sequences)

    def read(self) -> Iterator[Read]:
        """Wait for the device, then yield the token of each sequence that still waits for it.

        Sequences that were finished or cancelled after the choice are skipped, also those that the caller
        finishes while iterating.
        """
        found = {name: each.numpy() for name, each in self._on_host.whole().items()}
        tops: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for at, of_some in enumerate(self._tops):
            ids, logprobs = (found[f"{part} {at}"].reshape(-1, of_some.k) for part in ("ids", "top"))
            names = map(id, of_some.sequences)
            tops |= zip(names, zip(ids, logprobs, strict=True), strict=True)
        values = zip(found["tokens"].tolist(), found["logprobs"].tolist(), strict=True)
        for sequence, (token, logprob) in zip(self.sequences, values, strict=True):
            if sequence.unread:
                sequence.unread -= 1
                yield Read(sequence, token, logprob, tops.get(id(sequence)))


def find_ready(forward: ForwardResult | None, first: Sequence[SequenceState], slot_of: SlotOf) -> Ready | None:
    """Return the sequences that are due a token, or None if there are none.

    They are those in `first`, whose hidden states are known, and those whose last row was just computed.
    """
    items = [] if forward is None else forward.items
    last = [
        item
        for item in items
        # The request may have failed during this step; it then holds no pages.
        if not item.work.is_prompt and item.work.ends_sequence and item.work.sequence.pages
    ]
    sequences = [*first, *(item.work.sequence for item in last)]
    if not sequences:
        return None
    states = [sequence.hidden for sequence in first if sequence.hidden is not None]
    parts = [torch.stack(states)] if states else []
    if forward is not None and last:
        parts.append(_take(forward.hidden, [item.span.row for item in last]))
    order = sorted(range(len(sequences)), key=lambda at: slot_order(slot_of(sequences[at].group.request.weights)))
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Ready([sequences[at] for at in order], _take(hidden, order))


def _take(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of `hidden` `[n, d]`; a prefix in order is returned without a copy."""
    if list(rows) == list(range(len(rows))):
        return hidden[: len(rows)]
    return hidden.index_select(0, to_device(torch.tensor(rows), hidden.device))


def choose_next(ready: Ready, logits_of: Logits, slot_of: SlotOf, chunk_rows: int, copies: CopyStream) -> NextTokens:
    """Choose the next token of each sequence, `chunk_rows` at a time, and start the copy to the host."""
    tokens, logprobs, tops = [], [], []
    for at in range(0, len(ready.sequences), chunk_rows):
        sequences = ready.sequences[at : at + chunk_rows]
        slots = [slot_of(sequence.group.request.weights) for sequence in sequences]
        logits = logits_of(ready.hidden[at : at + chunk_rows], slots)
        chosen = choose(_constrained(logits, sequences), [_draw_params(each) for each in sequences])
        found, _ = picked_logprobs(logits[: len(sequences)], chosen[:, None])
        tokens.append(chosen)
        logprobs.append(found[:, 0])
        tops += list(_top_tokens(sequences, logits))
    for at, sequence in enumerate(ready.sequences):
        sequence.hidden = None
        sequence.unread += 1
        sequence.chosen_at = at
    every = torch.cat(tokens)
    arenas = {"tokens": every, "logprobs": torch.cat(logprobs)}
    for at, each in enumerate(tops):
        arenas |= {f"ids {at}": each.ids.flatten(), f"top {at}": each.logprobs.flatten()}
    return NextTokens(ready.sequences, every, tops, carry_out(copies, arenas))


def _draw_params(sequence: SequenceState) -> DrawParams:
    """Return the sampling parameters of the next token of a sequence."""
    request = sequence.group.request
    if not request.temperature:
        return DrawParams(0.0, request.top_k, request.top_p, 0.0)
    point = uniform(request.seed, sequence.index, len(sequence.tokens) + sequence.unread)
    return DrawParams(request.temperature, request.top_k, request.top_p, point)


def _constrained(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Return logits `[n padded, V]` without the tokens that the grammars of sequences exclude.

    Rows of other sequences keep their bits. The input is unchanged, for the log-probs of the model.
    """
    grammars = {at: s.grammar for at, s in enumerate(sequences) if s.grammar is not None}
    if not grammars:
        return logits
    logits = logits.clone()
    for at, grammar in grammars.items():
        excluded = to_device(torch.from_numpy(~grammar.allowed()), logits.device)
        logits[at].masked_fill_(excluded, -torch.inf)
    return logits


def _top_tokens(sequences: Sequence[SequenceState], logits: torch.Tensor) -> Iterator[TopTokens]:
    """Yield the most probable tokens for sequences that requested them, batched by `k`."""
    wanted = [sequence.group.request.topk_sample_logprobs for sequence in sequences]
    for k in set(wanted) - {0}:
        rows = [at for at, own in enumerate(wanted) if own == k]
        yield TopTokens([sequences[at] for at in rows], k, *likeliest(_take(logits, rows), k))


def uniform(seed: int, sequence: int, token: int) -> float:
    """Return the uniform number of one token, derived only from its three arguments."""
    name = f"{seed}:{sequence}:{token}".encode()
    bits = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def choose(logits: torch.Tensor, params: Sequence[DrawParams]) -> torch.Tensor:
    """Return a token for each of the first rows of `logits` `[>= len(params), V]`: int64 `[n]`."""
    parts = [
        _choose_some(logits[start : start + ROWS], params[start : start + ROWS])
        for start in range(0, len(params), ROWS)
    ]
    return torch.cat(parts)


def _choose_some(logits: torch.Tensor, params: Sequence[DrawParams]) -> torch.Tensor:
    """Return the tokens of at most `ROWS` rows."""
    likeliest = logits[: len(params)].argmax(dim=-1)
    drawn = [at for at, each in enumerate(params) if each.temperature > 0]
    if not drawn:
        return likeliest
    device = logits.device
    rows = to_device(torch.tensor(drawn), device)
    wanted = [params[at] for at in drawn]
    temperatures = to_device(torch.tensor([c.temperature for c in wanted], dtype=logits.dtype), device)
    temperatures.clamp_(min=torch.finfo(logits.dtype).tiny)  # a value rounded to 0 would give 0 / 0
    some = logits.index_select(0, rows)
    scaled = (some - some.amax(dim=-1, keepdim=True)) / temperatures[:, None]  # at most 0: no overflow
    weights = (torch.softmax(scaled, dim=-1) * UNIT).long()  # [rows, V]
    _keep_most_probable(weights, wanted)
    uniforms = to_device(torch.tensor([c.uniform for c in wanted], dtype=torch.float64), device)
    found = _draw(weights, uniforms)
    with unordered_writes():
        return likeliest.index_copy_(0, rows, found)


def _keep_most_probable(weights: torch.Tensor, params: Sequence[DrawParams]) -> None:
    """Zero `weights` `[rows, V]` excluded by top_k, then by top_p; equal weights are treated alike."""
    for k in {each.top_k for each in params if 0 < each.top_k < weights.shape[1]}:
        rows = _matching(weights, [each.top_k == k for each in params])
        some = weights.index_select(0, rows)
        least = some.topk(k, dim=-1).values[:, -1:]
        with unordered_writes():
            weights.index_copy_(0, rows, some.where(some >= least, 0))
    narrow = [each.top_p < 1 for each in params]
    if any(narrow):
        rows = _matching(weights, narrow)
        given = torch.tensor([each.top_p for each in params if each.top_p < 1])
        shares = to_device(given, weights.device).double()
        kept = _nucleus(weights.index_select(0, rows), shares)
        with unordered_writes():
            weights.index_copy_(0, rows, kept)


def _nucleus(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Zero all but the fewest largest weights whose sum reaches each row's share of the total."""
    ordered = weights.sort(dim=-1, descending=True).values
    sums = ordered.cumsum(dim=-1)
    before = (sums - ordered).double()  # sum of all larger weights
    kept = (before < shares[:, None] * sums[:, -1:].double()).sum(dim=-1, keepdim=True)
    least = ordered.gather(1, (kept - 1).clamp(min=0))
    return weights.where(weights >= least, 0)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return for each row the first index whose cumulative sum exceeds `uniform * total`.

    Rows with invalid weights (NaN in the logits) get an arbitrary valid index: the next step may look it
    up before the host detects the NaN.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    points = (uniforms * total.double()).long().clamp(max=total - 1)
    found = torch.searchsorted(sums, points[:, None], right=True)[:, 0]
    return found.clamp_(max=weights.shape[1] - 1)


def _matching(weights: torch.Tensor, wanted: Sequence[bool]) -> torch.Tensor:
    """Return the indices of wanted rows, int64."""
    rows = [at for at, is_wanted in enumerate(wanted) if is_wanted]
    return to_device(torch.tensor(rows), weights.device)
