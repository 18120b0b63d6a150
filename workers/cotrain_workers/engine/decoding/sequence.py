"""State of a sample request in progress: its sequences, the requested scores of its prompt, the queue of its tenant."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal

import numpy as np
import torch

from cotrain_workers.engine.decoding.kv_cache import Node, Origin
from cotrain_workers.engine.decoding.requests import (
    NOT_COMPUTED_LOGPROB,
    Grammar,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TopK,
)
from cotrain_workers.engine.decoding.stop_strings import ReadText
from cotrain_workers.engine.model.unembedding import likeliest, picked_logprobs
from cotrain_workers.engine.model.vision import image_key, rotary_positions

SKIPPED = -1  # target without a log-probability


@dataclass(eq=False)
class SequenceGroup:
    """A request in progress. Its first sequence computes the prompt, which the others share."""

    request: SampleRequest
    arrival: int  # smaller is older
    page_tokens: int
    limit: int  # maximum tokens of a sequence, prompt included
    scores: PromptScores | None  # None: no scores of the prompt are requested
    features: list[torch.Tensor] = field(default_factory=list)
    """Results of the vision tower `[1 + L, n, d]` for the first images of the prompt."""
    prompt: list[int] = field(init=False)
    chunks: list[bytes] = field(init=False)  # pages of the prompt; the last may be partial
    computed: set[int] = field(default_factory=set)  # pages of the prompt not found in the cache
    has_begun: bool = False
    is_prompt_ready: bool = False  # the whole prompt was computed or found at least once
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    experts: np.ndarray | None = None  # of the prompt, int16 [P, layers, k]; once a sequence ended
    _preempted: list[SequenceState] = field(default_factory=list)  # oldest first
    _new: SequenceState = field(init=False)  # the next sequence that has never run

    def __post_init__(self) -> None:
        tokens, step = self.request.prompt, self.page_tokens
        self.prompt = tokens.tolist()
        images = self.request.images
        self.chunks = [
            tokens[at : at + step].astype(np.int64).tobytes() + image_key(images, at, at + step)
            for at in range(0, len(tokens), step)
        ]
        self._new = SequenceState(self, 0)

    @property
    def has_waiting(self) -> bool:
        """True if any of its sequences is waiting."""
        return bool(self._preempted) or self._new.index < self.request.num_samples

    def next(self) -> SequenceState | None:
        """Return its oldest sequence that may run now. New ones wait until the first has computed the prompt."""
        if self._preempted:
            return self._preempted[0]
        return self._new if self.has_waiting and (self._new.index == 0 or self.is_prompt_ready) else None

    def begin(self, sequence: SequenceState) -> None:
        """Remove the sequence returned by `next` from the waiting ones."""
        if self._preempted:
            self._preempted.remove(sequence)
        else:
            self._new = SequenceState(self, sequence.index + 1)

    def wait_again(self, sequence: SequenceState) -> None:
        """Add a sequence that was running to the waiting ones."""
        insort(self._preempted, sequence, key=attrgetter("age"))

    @property
    def lacks_images(self) -> bool:
        """True if an image of the prompt has not been computed yet."""
        return len(self.features) < len(self.request.images)

    @cached_property
    def prompt_positions(self) -> tuple[np.ndarray, int]:
        """Rotary positions `[3, P]` of the prompt, and that of the first token after it."""
        return rotary_positions(len(self.prompt), self.request.images)

    @property
    def origin(self) -> Origin:
        """Scope in which the pages of its prompt are shared."""
        return Origin(self.request.weights, self.request.tenant)

    @property
    def generates_nothing(self) -> bool:
        """True if no token is requested, or none fits."""
        return self.limit <= len(self.prompt)

    @property
    def cached_prompt_tokens(self) -> int:
        """Number of prompt tokens that were never computed for this request."""
        return len(self.prompt) - sum(
            min(self.page_tokens, len(self.prompt) - page * self.page_tokens) for page in self.computed
        )

    def output(self) -> SampleOutput:
        """Return a finished request as plain data; sequences without tokens have the stop reason "length"."""
        scores, numbers = self.scores, range(self.request.num_samples)
        return SampleOutput(
            sequences=[self.finished.get(at) or SequenceState(self, at).result("length") for at in numbers],
            prompt_logprobs=scores.logprobs if scores else None,
            topk_prompt=scores.topk if scores else None,
            target_prompt_logprobs=scores.targets if scores else None,
            cached_prompt_tokens=self.cached_prompt_tokens if self.has_begun else 0,
            prompt_routed_experts=self.experts,
        )

    def first_scored_chunk(self) -> int:
        """Return the first page of the prompt whose hidden states are needed for scores."""
        return len(self.chunks) if self.scores is None else self.scores.first_row // self.page_tokens


@dataclass(eq=False)
class SequenceState:
    """One continuation in progress. Generated tokens survive a preemption, pages do not."""

    group: SequenceGroup
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # [k] each, per token
    read_text: ReadText = field(default_factory=ReadText)
    grammar: Grammar | None = None  # created with its first token
    # Only while it is running:
    pages: list[int] = field(default_factory=list)  # keys and values of position p: pages[p // size]
    stored: int = 0  # positions whose keys and values are stored
    experts: list[np.ndarray] = field(default_factory=list)
    """Experts of the stored positions, int16 `[positions, layers, k]` each; only if they are requested."""
    node: Node | None = None  # index node of the last stored prompt page
    is_indexed: bool = True  # False once the index has dropped one of its pages
    hidden: torch.Tensor | None = None  # `[d]` of the last prompt token, until the first token
    resumed_at: int = 0  # number of tokens at its last admission
    unread: int = 0  # tokens after `tokens` that the device has chosen and the host has not read
    chosen_at: int = 0  # index of the last of them among the tokens chosen in its step

    @property
    def age(self) -> tuple[int, int]:
        """Sort key of sequences; smaller is older."""
        return (self.group.arrival, self.index)

    @property
    def length(self) -> int:
        """Number of tokens, including the prompt and unread tokens."""
        return len(self.group.prompt) + len(self.tokens) + self.unread

    @property
    def is_full(self) -> bool:
        """True if there is no space for another token."""
        return self.length >= self.group.limit

    @property
    def is_prompt_stored(self) -> bool:
        """True if the whole prompt is stored."""
        return self.stored >= len(self.group.prompt)

    @property
    def scores_prompt(self) -> bool:
        """True if this sequence computes the requested scores of the prompt."""
        group = self.group
        return self.index == 0 and group.scores is not None and not group.is_prompt_ready

    def rotary_positions(self, start: int, stop: int) -> np.ndarray:
        """Return the rotary positions `[3, n]` of some tokens, in a prompt or after it."""
        prompt, after = self.group.prompt_positions
        size = prompt.shape[1]
        later = np.arange(max(start, size), max(stop, size)) - size + after
        return np.concatenate([prompt[:, start:stop], np.tile(later, (3, 1))], axis=1)

    def note_experts(self, chosen: np.ndarray | None) -> None:
        """Record the experts `[n, layers, k]` of its next positions, if they are requested."""
        if self.group.request.return_routed_experts and chosen is not None:
            self.experts.append(chosen)

    def token(self, position: int) -> int:
        """Return the token at a position; -1 - `chosen_at` for the last one while it is unread."""
        prompt = self.group.prompt
        if position < len(prompt):
            return prompt[position]
        if self.unread and position == self.length - 1:
            return -1 - self.chosen_at
        return self.tokens[position - len(prompt)]

    def result(self, reason: Literal["stop", "length"]) -> SampledSequence:
        """Return a finished sequence as plain data."""
        k, topk, experts = self.group.request.topk_sample_logprobs, None, None
        if k:
            ids, logprobs = (np.array([pair[part] for pair in self.topk]).reshape(-1, k) for part in (0, 1))
            topk = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
        if self.experts:
            chosen, prompt = np.concatenate(self.experts), len(self.group.prompt)
            self.group.experts = chosen[:prompt]
            # A step that began before the last token was read may have stored that token.
            experts = chosen[prompt : prompt + max(0, len(self.tokens) - 1)]
        tokens = np.array(self.tokens, dtype=np.int32)
        return SampledSequence(tokens, np.array(self.logprobs, np.float32), reason, topk, experts)


@dataclass
class TenantQueue:
    """Sequences of one tenant."""

    groups: list[SequenceGroup] = field(default_factory=list)  # requests with waiting sequences, oldest first
    running: list[SequenceState] = field(default_factory=list)  # running sequences, oldest first
    weight: float = 1.0  # weight given by the tenant's newest request

    @property
    def is_empty(self) -> bool:
        """True if the tenant has no sequence."""
        return not (self.groups or self.running)

    def wait(self, group: SequenceGroup) -> None:
        """Enqueue the waiting sequences of a request."""
        if group not in self.groups:
            insort(self.groups, group, key=attrgetter("arrival"))

    def first(self) -> SequenceState | None:
        """Return the oldest sequence that may be admitted.

        The first sequence of a request computes the prompt; its other sequences are admitted after that.
        """
        for group in self.groups:
            sequence = group.next()
            if sequence is not None:
                return sequence
        return None

    def admit(self, sequence: SequenceState) -> None:
        """Move the sequence returned by `first` to the running ones."""
        group = sequence.group
        group.begin(sequence)
        if not group.has_waiting:
            self.groups.remove(group)
        insort(self.running, sequence, key=attrgetter("age"))

    def preempt(self, sequence: SequenceState) -> None:
        """Move a running sequence back to the waiting ones."""
        self.running.remove(sequence)
        sequence.group.wait_again(sequence)
        self.wait(sequence.group)

    def cancel(self, group: SequenceGroup) -> list[SequenceState]:
        """Remove a request; return its sequences that were running."""
        if group in self.groups:
            self.groups.remove(group)
        ran = [sequence for sequence in self.running if sequence.group is group]
        self.running = [sequence for sequence in self.running if sequence.group is not group]
        return ran


class PromptScores:
    """Requested log-probabilities of a prompt of `P` tokens, filled page by page.

    The hidden state of row `i` predicts token `i + 1`.
    """

    def __init__(self, request: SampleRequest) -> None:
        size, last_n = len(request.prompt), request.prompt_logprobs_last_n
        self._first_own_row = 0 if last_n is None else max(0, size - 1 - last_n)
        # Targets are scored at all positions; `last_n` does not apply to them.
        has_targets = request.target_prompt_logprobs is not None
        self.first_row = 0 if has_targets else self._first_own_row
        self._prompt = request.prompt
        self._targets = request.target_prompt_logprobs
        k = request.topk_prompt_logprobs
        self.logprobs = np.full(size, np.nan, np.float32) if request.prompt_logprobs else None
        self.topk = (
            TopK(np.zeros((size, k), np.int32), np.full((size, k), NOT_COMPUTED_LOGPROB, np.float32)) if k else None
        )
        self.targets = None if self._targets is None else np.full(self._targets.shape, np.nan, np.float32)

    def rows(self, start: int, stop: int) -> range:
        """Return those of the rows `start` to `stop` whose log-probabilities are requested."""
        return range(max(start, self.first_row), min(stop, len(self._prompt) - 1))

    def fill(self, rows: range, logits: torch.Tensor) -> bool:
        """Compute results from `logits` `[len(rows), V]`; return False if they are not finite."""
        if not torch.isfinite(logits.amax(dim=-1)).all():
            return False
        columns = self._columns(rows, logits.device)
        found, _ = picked_logprobs(logits, columns)
        values = found.float().cpu().numpy()
        before = max(0, self._first_own_row - rows.start)  # rows that only the targets need
        own = slice(rows.start + 1 + before, rows.stop + 1)
        if self.logprobs is not None:
            self.logprobs[own] = values[before:, 0]
        if self._targets is not None and self.targets is not None:
            here = slice(rows.start, rows.stop)
            skipped = self._targets[here] == SKIPPED
            self.targets[here] = np.where(skipped, np.nan, values[:, 1:])
        if self.topk is not None and before < len(rows):
            ids, logprobs = likeliest(logits[before:], self.topk.token_ids.shape[1])
            self.topk.token_ids[own] = ids.cpu().numpy()
            self.topk.logprobs[own] = logprobs.cpu().numpy()
        return True

    def _columns(self, rows: range, device: torch.device) -> torch.Tensor:
        """Return the tokens to score in each row: the prompt's own token, then the targets."""
        columns = [self._prompt[rows.start + 1 : rows.stop + 1, None]]
        if self._targets is not None:
            columns.append(self._targets[rows.start : rows.stop].clip(min=0))
        return torch.from_numpy(np.concatenate(columns, axis=1)).to(device)
