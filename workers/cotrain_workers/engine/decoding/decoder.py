"""Continuous-batching decoder of the engine: packed steps over many requests and adapters.

The decoder uses the modules, weights and head of training. On CPU in fp32 a seeded request returns
bit-identical tokens and log-probabilities alone and in any batch, with cached pages and after preemption.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch

from cotrain_workers.engine.adapters.copies import CopyStream
from cotrain_workers.engine.decoding.adapter_slots import (
    WeightSlots,
    WeightsNotFinite,
    WeightsUnfit,
    default_bytes,
)
from cotrain_workers.engine.decoding.kv_cache import (
    MAX_SEQUENCES,
    SHARED_STEP_TOKENS,
    STEP_TOKENS,
    DecoderSizes,
    KvCache,
    Pages,
    PrefixIndex,
    affordable_tokens,
    decoder_share,
    default_page_tokens,
    sampler_bytes,
)
from cotrain_workers.engine.decoding.model_runner import ForwardResult, ModelRunner
from cotrain_workers.engine.decoding.next_tokens import NextTokens, choose_next, find_ready
from cotrain_workers.engine.decoding.requests import (
    Grammar,
    GrammarOf,
    GrammarUnusable,
    NewTokens,
    SampleOutput,
    SampleRequest,
    StepResults,
    TextOf,
)
from cotrain_workers.engine.decoding.scheduler import DecodeScheduler, StepSizes
from cotrain_workers.engine.decoding.sequence import SKIPPED, PromptScores, SequenceGroup, SequenceState
from cotrain_workers.engine.decoding.stop_strings import has_stopped
from cotrain_workers.engine.host import StepCores, keeps_bits
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.vision import ImageUnusable, Vision
from cotrain_workers.engine.ops import Failure, HostWeights, WeightsMissing


class EngineDecoder:
    """Decoder over the base model of an engine. Not thread-safe; never steps inside a micro-batch."""

    def __init__(
        self,
        base: BaseModel,
        weights: Callable[[str], HostWeights],
        text: TextOf | None,
        sizes: DecoderSizes,
        grammar_of: GrammarOf | None = None,
    ) -> None:
        device, dtype = base.head_weight.device, base.head_weight.dtype
        state_bytes = sum(each.sizes(dtype.itemsize) for each in base.states)
        page = sizes.page_tokens or default_page_tokens(base.kv, dtype, device.type, state_bytes)
        share = decoder_share(device)
        weights_bytes = sizes.weights_bytes
        if weights_bytes is None:
            weights_bytes = sampler_bytes(default_bytes(base.targets, dtype), share)
        kv_bytes = None if share is None else max(share // 2, share - weights_bytes)
        tokens = sizes.kv_tokens or affordable_tokens(base.kv, base.context_length, dtype, kv_bytes, state_bytes, page)
        pages = Pages(max(2, tokens // page))
        self.pages = pages
        self._vocab_size = base.vocab_size
        self._vision = base.vision
        self._text = text
        self._grammar_of = grammar_of
        # Limit of a prompt plus its continuation:
        self.max_sequence_tokens = min(base.context_length, (pages.count - 1) * page)
        self._page_tokens = page
        self._index = PrefixIndex(pages)
        self.slots = WeightSlots(base.targets, device, dtype, weights, weights_bytes)
        step_tokens = MAX_SEQUENCES + max(page, sizes.step_tokens or STEP_TOKENS[device.type])
        shared = SHARED_STEP_TOKENS[device.type]
        step = StepSizes(page, alone=step_tokens, shared=shared, sequences=MAX_SEQUENCES)
        self.scheduler = DecodeScheduler(pages, self._index, step)
        self._cache = KvCache(base.kv, pages.count, page, device, dtype, base.states)
        self._head_chunk_rows = sizes.head_chunk_rows
        self.runner = ModelRunner(base, self._cache, -(-self.max_sequence_tokens // page))
        self._groups: dict[str, SequenceGroup] = {}
        self._copies = CopyStream(device)
        self.overlaps = device.type == "cuda"  # on a CPU, host and device are the same cores
        chooses_cores = device.type == "cpu" and keeps_bits()
        self.cores: AbstractContextManager[object] = (
            StepCores(torch.get_num_threads()) if chooses_cores else nullcontext()
        )
        self._launched: NextTokens | None = None  # tokens of the step that the device computes between two calls
        self._empty: list[tuple[str, SampleOutput]] = []  # requests that need no step at all
        self._arrivals = 0
        self.preemptions = 0  # since the decoder was created

    @property
    def busy(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._groups or self._empty)

    @property
    def waiting(self) -> Counter[str]:
        """Number of requests that were added and have not started, by tenant."""
        return Counter(g.request.tenant for g in self._groups.values() if not g.has_begun)

    @property
    def kv_cache_ratio(self) -> float:
        """Ratio of KV-cache pages held by sequences. Safe to read from any thread."""
        return 1 - (self.pages.free + self.pages.idle) / self.pages.count

    def refuse(self, request: SampleRequest) -> str | None:
        """Return the reason why this request can never run here, as a sentence for the tenant, or None.

        The API has checked its numbers. Tokens are checked again, because a wrong index on a GPU would crash the
        process for every tenant.
        """
        size, vocab = len(request.prompt), self._vocab_size
        if size > self.max_sequence_tokens:
            return (
                f"The prompt has {size} tokens; prompt and generated tokens together are at most "
                f"{self.max_sequence_tokens} here."
            )
        if request.images and self._vision is None:
            return "This sampler reads no images."
        if request.stop_strings and self._text is None:
            return "Stop strings need a tokenizer, and this model has none; stop at token ids."
        if ((request.prompt < 0) | (request.prompt >= vocab)).any():
            return f"The prompt holds a token outside the vocabulary (0..{vocab - 1})."
        targets = request.target_prompt_logprobs
        if targets is not None and ((targets < SKIPPED) | (targets >= vocab)).any():
            return f"target_prompt_logprobs names a token outside the vocabulary (0..{vocab - 1})."
        if request.grammar is not None:
            try:
                self._start_of_grammar(request)
            except GrammarUnusable as reason:
                return f"response_format: the grammar cannot be used: {reason}."
        return None

    def _start_of_grammar(self, request: SampleRequest) -> Grammar:
        if self._grammar_of is None or not request.stop_tokens:
            raise GrammarUnusable("this model has no tokenizer, or no end of sequence")
        assert request.grammar is not None
        return self._grammar_of(request.grammar, self._vocab_size, request.stop_tokens)

    def add(self, request: SampleRequest) -> None:
        """Queue a request that `refuse` accepted."""
        assert request.id not in self._groups
        limit = self.max_sequence_tokens
        if request.max_tokens is not None:
            limit = min(limit, len(request.prompt) + request.max_tokens)
        scores = PromptScores(request) if request.scores_prompt else None
        group = SequenceGroup(request, self._arrivals, self._page_tokens, limit, scores)
        self._arrivals += 1
        if group.generates_nothing and scores is None and not request.return_routed_experts:
            self._empty.append((request.id, group.output()))
            return
        self._groups[request.id] = group
        self.scheduler.add(group)

    def cancel(self, request_id: str) -> None:
        """Cancel a request and free its memory; no output follows. Unknown ids are ignored."""
        self._empty = [each for each in self._empty if each[0] != request_id]
        if request_id in self._groups:
            self._forget(self._groups[request_id])

    def drop_weights(self, key: str) -> None:
        """Drop copies of weights that no later request uses. Copies in use stay until they are unused."""
        self.slots.drop(key)
        self._index.drop(key)

    @torch.inference_mode()
    def step(self) -> StepResults:
        """Admit waiting sequences, compute one packed step and choose the next token of each ready sequence.

        On a GPU the following step starts before the tokens of this one are read, if it only continues
        running sequences. The next call then reads tokens without starting a step first. Results that
        such a step computes for a sequence that has ended are discarded.
        """
        results = StepResults(finished=list(self._empty))
        if self._vision is not None:
            self._compute_image(self._vision, results)
        with self.cores:
            return self._step(results)

    def _compute_image(self, vision: Vision, results: StepResults) -> None:
        """Run the vision tower for one image of a waiting request, so that other sequences wait for one at most."""
        ready: set[str] = set()  # tenants whose next request lacks no image
        while (sequence := self.scheduler.next_waiting(ready)) is not None:
            group = sequence.group
            if not group.lacks_images:
                ready.add(group.request.tenant)
                continue
            image = group.request.images[len(group.features)]
            try:
                group.features.append(vision.features(group.request.tenant or group.request.id, image))
                results.images += 1
            except ImageUnusable as unusable:
                self._fail(group, str(unusable), "user", results)
            return

    def _step(self, results: StepResults) -> StepResults:
        self._empty.clear()
        launched, self._launched = self._launched, None
        if launched is None or not launched.is_wanted:
            self._admit(results)
            launched = self._launch(results)
        if launched is not None:
            # With a grammar, the next token depends on the unread one.
            has_grammar = any(each.group.request.grammar for each in self.scheduler.running)
            if self.overlaps and not has_grammar and self.scheduler.only_goes_on():
                self._launched = self._launch(results, launched.tokens)
            self._append_tokens(launched, results)
        return results

    def _launch(self, results: StepResults, chosen: torch.Tensor | None = None) -> NextTokens | None:
        """Start a step on the device and choose the tokens after it; return None if no sequence gets one.

        `chosen` are the unread tokens of the step before, if any.
        """
        plan = self.scheduler.plan()
        self._note_preempted(plan.preempted)
        self._cache.prepare(plan.copies, plan.blank)
        forward = self.runner.forward(plan, self.slots.slot_of, chosen)
        if forward is not None:
            self._note_stored(forward, results)
        ready = find_ready(forward, self._due_first_tokens(results), self.slots.slot_of)
        if ready is None:
            return None
        for sequence in ready.sequences:
            if sequence.group.request.grammar is not None and sequence.grammar is None:
                sequence.grammar = self._start_of_grammar(sequence.group.request)
        return choose_next(ready, self.runner.logits, self.slots.slot_of, self._head_chunk_rows, self._copies)

    def _admit(self, results: StepResults) -> None:
        """Admit sequences until one does not fit; fail requests whose weights cannot be used."""
        blocked: set[str] = set()  # tenants whose next weights are unavailable now
        while (sequence := self.scheduler.next_waiting(blocked)) is not None:
            group = sequence.group
            if group.lacks_images:
                blocked.add(group.request.tenant)
                continue
            preempted = self.scheduler.preempt_for(sequence)
            if preempted is None:
                return
            self._note_preempted(preempted)
            try:
                if not self._pin(sequence):
                    blocked.add(group.request.tenant)
                    continue
            except OSError:  # a temporary read error: the sequence keeps its position in the queue
                blocked.add(group.request.tenant)
            except WeightsMissing as missing:
                unreadable = f"The weights cannot be read on the server: {missing.reason}"
                reason = unreadable if missing.reason else "The weights are gone."
                self._fail(group, reason, "user", results)
            except WeightsNotFinite:
                self._fail(group, "The weights hold values that are not finite.", "user", results)
            except WeightsUnfit:
                self._fail(group, "The weights do not fit this base model.", "server", results)
            else:
                self.scheduler.admit(sequence)
                group.has_begun = True

    def _pin(self, sequence: SequenceState) -> bool:
        """Pin the weights of a sequence on the device. This may preempt sequences with other weights."""
        weights = sequence.group.request.weights
        if weights is None or self.slots.pin(weights) is not None:
            return True
        fits_without = partial(self.slots.fits_without, weights)
        for candidates in (self.slots.rivals(weights), self.slots.in_use()):
            preempted = self.scheduler.evict_weights_for(sequence, candidates, fits_without)
            if preempted is not None:
                self._note_preempted(preempted)
                return self.slots.pin(weights, at_once=True) is not None
        return False

    def _note_preempted(self, sequences: Sequence[SequenceState]) -> None:
        self.preemptions += len(sequences)
        for sequence in sequences:
            self.slots.unpin(sequence.group.request.weights)

    def _note_stored(self, forward: ForwardResult, results: StepResults) -> None:
        """Record the pages that a step has stored, and compute the requested prompt log-probabilities."""
        routes = forward.routes_on_host()
        for chunk, span, _ in forward.items:
            own = slice(span.row, span.row + chunk.stop - chunk.start)
            experts = None if routes is None else routes[own].copy()
            if not chunk.is_prompt:
                chunk.sequence.stored = chunk.stop
                chunk.sequence.note_experts(experts)
                continue
            group = chunk.sequence.group
            hidden = forward.hidden[own]
            results.prompt_tokens += chunk.stop - chunk.start
            if group.request.id not in self._groups:
                continue  # an earlier page of this prompt failed
            if chunk.sequence.scores_prompt and not self._score(group, chunk.start, hidden):
                self._fail_not_finite(group, results)
                continue
            last = hidden[-1].clone() if chunk.ends_prompt else None
            self.scheduler.memory.store(chunk, last, experts)

    def _score(self, group: SequenceGroup, start: int, hidden: torch.Tensor) -> bool:
        """Compute log-probabilities of a page of a prompt; return False if they are not finite."""
        assert group.scores is not None
        rows = group.scores.rows(start, start + len(hidden))
        for at in range(rows.start, rows.stop, self._head_chunk_rows):
            some = range(at, min(at + self._head_chunk_rows, rows.stop))
            slots = [self.slots.slot_of(group.request.weights)] * len(some)
            logits = self.runner.logits(hidden[some.start - start : some.stop - start], slots)
            if not group.scores.fill(some, logits[: len(some)]):
                return False
        return True

    def _due_first_tokens(self, results: StepResults) -> list[SequenceState]:
        """Return sequences that are due their first token; finish requests that generate no tokens."""
        found = []
        for sequence in self.scheduler.running:
            if sequence.hidden is None:
                continue
            if sequence.group.generates_nothing:
                sequence.group.finished[0] = sequence.result("length")
                self._finish(sequence.group, results)
            else:
                found.append(sequence)
        return found

    def _append_tokens(self, launched: NextTokens, results: StepResults) -> None:
        """Append its chosen token to each sequence. Waits for the device."""
        for sequence, token, logprob, top in launched.read():
            if not math.isfinite(logprob):
                self._fail_not_finite(sequence.group, results)
                continue
            if top is not None:
                sequence.topk.append(top)
            self._append(sequence, token, logprob, results)

    def _append(self, sequence: SequenceState, token: int, logprob: float, results: StepResults) -> None:
        """Append a token to a sequence, and finish the sequence after its last token."""
        request, offset = sequence.group.request, len(sequence.tokens)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        results.decoded_tokens += 1
        results.tokens.append(NewTokens(request.id, sequence.index, offset, (token,), (logprob,)))
        stopped = has_stopped(token, request, sequence.read_text, self._text)
        if sequence.grammar is not None and not sequence.grammar.advance(token):
            self._fail(sequence.group, f"response_format: {sequence.grammar.failure}.", "user", results)
            return
        if not (stopped or (sequence.is_full and not sequence.unread)):
            return
        sequence.group.finished[sequence.index] = sequence.result("stop" if stopped else "length")
        self.scheduler.remove(sequence)
        self.slots.unpin(sequence.group.request.weights)
        if len(sequence.group.finished) == request.num_samples:
            self._finish(sequence.group, results)

    def _finish(self, group: SequenceGroup, results: StepResults) -> None:
        results.finished.append((group.request.id, group.output()))
        self._forget(group)

    def _fail_not_finite(self, group: SequenceGroup, results: StepResults) -> None:
        self._fail(group, "The model's log-probabilities are not finite.", "user", results)

    def _fail(
        self, group: SequenceGroup, message: str, category: Literal["user", "server"], results: StepResults
    ) -> None:
        results.finished.append((group.request.id, Failure(message, category)))
        self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        """Remove a request and free its memory."""
        del self._groups[group.request.id]
        for sequence in self.scheduler.cancel(group):
            self.slots.unpin(sequence.group.request.weights)
