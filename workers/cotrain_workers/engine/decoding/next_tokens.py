"""Next tokens of ready sequences, chosen on the device and read by the host when the copy is complete."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.adapters.copy_streams import CopyStream, HostArenas, carry_out
from cotrain_workers.engine.decoding.model_runner import Forward
from cotrain_workers.engine.decoding.prompt_logprobs import likeliest
from cotrain_workers.engine.decoding.sequence import SequenceState
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.decoding.step import slot_order
from cotrain_workers.engine.decoding.token_sampler import Choice, choose, uniform
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.unembedding import picked_logprobs

# (hidden states [n, d], slots) -> logits [n padded, V]
Logits = Callable[[torch.Tensor, list[Slot | None]], torch.Tensor]


class Ready(NamedTuple):
    """Sequences that are due a token, sorted by adapter, and their hidden states `[n, d]`."""

    sequences: list[SequenceState]
    hidden: torch.Tensor


class TextRequest(NamedTuple):
    """Most probable tokens of the sequences that requested `k` of them."""

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
    _asked: Sequence[TextRequest]
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
        for at, asked in enumerate(self._asked):
            ids, logprobs = (found[f"{part} {at}"].reshape(-1, asked.k) for part in ("ids", "top"))
            names = map(id, asked.sequences)
            tops |= zip(names, zip(ids, logprobs, strict=True), strict=True)
        values = zip(found["tokens"].tolist(), found["logprobs"].tolist(), strict=True)
        for sequence, (token, logprob) in zip(self.sequences, values, strict=True):
            if sequence.unread:
                sequence.unread -= 1
                yield Read(sequence, token, logprob, tops.get(id(sequence)))


def find_ready(
    forward: Forward | None, first: Sequence[SequenceState], slot_of: Mapping[str | None, Slot | None]
) -> Ready | None:
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
        parts.append(take(forward.hidden, [item.span.row for item in last]))
    order = sorted(range(len(sequences)), key=lambda at: slot_order(slot_of[sequences[at].group.request.weights]))
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Ready([sequences[at] for at in order], take(hidden, order))


def take(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of `hidden` `[n, d]`; a prefix in order is returned without a copy."""
    if list(rows) == list(range(len(rows))):
        return hidden[: len(rows)]
    return hidden.index_select(0, to_device(torch.tensor(rows), hidden.device))


def choose_next(
    ready: Ready, logits_of: Logits, slot_of: Mapping[str | None, Slot | None], chunk_rows: int, copies: CopyStream
) -> NextTokens:
    """Choose the next token of each sequence, `chunk_rows` at a time, and start the copy to the host."""
    tokens, logprobs, asked = [], [], []
    for at in range(0, len(ready.sequences), chunk_rows):
        sequences = ready.sequences[at : at + chunk_rows]
        slots = [slot_of[sequence.group.request.weights] for sequence in sequences]
        logits = logits_of(ready.hidden[at : at + chunk_rows], slots)
        chosen = choose(constrained(logits, sequences), [choice_of(each) for each in sequences])
        found, _ = picked_logprobs(logits[: len(sequences)], chosen[:, None])
        tokens.append(chosen)
        logprobs.append(found[:, 0])
        asked += list(ask(sequences, logits))
    for at, sequence in enumerate(ready.sequences):
        sequence.hidden = None
        sequence.unread += 1
        sequence.chosen_at = at
    every = torch.cat(tokens)
    arenas = {"tokens": every, "logprobs": torch.cat(logprobs)}
    for at, each in enumerate(asked):
        arenas |= {f"ids {at}": each.ids.flatten(), f"top {at}": each.logprobs.flatten()}
    return NextTokens(ready.sequences, every, asked, carry_out(copies, arenas))


def choice_of(sequence: SequenceState) -> Choice:
    """Return the sampling parameters of the next token of a sequence."""
    request = sequence.group.request
    if not request.temperature:
        return Choice(0.0, request.top_k, request.top_p, 0.0)
    point = uniform(request.seed, sequence.index, len(sequence.tokens) + sequence.unread)
    return Choice(request.temperature, request.top_k, request.top_p, point)


def constrained(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
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


def ask(sequences: Sequence[SequenceState], logits: torch.Tensor) -> Iterator[TextRequest]:
    """Yield the most probable tokens for sequences that requested them, batched by `k`."""
    wanted = [sequence.group.request.topk_sample_logprobs for sequence in sequences]
    for k in set(wanted) - {0}:
        rows = [at for at, own in enumerate(wanted) if own == k]
        yield TextRequest([sequences[at] for at in rows], k, *likeliest(take(logits, rows), k))
