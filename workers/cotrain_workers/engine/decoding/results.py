"""Conversion of sequences in progress to results, and the sampling parameters of the next token."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cotrain_workers.engine.decoding.requests import (
    NewTokens,
    Progress,
    SampledSequence,
    SampleOutput,
    TopK,
)
from cotrain_workers.engine.decoding.sequence import Group, SequenceState
from cotrain_workers.engine.decoding.token_sampler import Choice, uniform
from cotrain_workers.engine.ops import Failure


@dataclass
class StepLog:
    """Results of the current step, collected so far."""

    finished: list[tuple[str, SampleOutput | Failure]] = field(default_factory=list)
    tokens: list[NewTokens] = field(default_factory=list)
    prompt_tokens: int = 0
    images: int = 0

    def progress(self) -> Progress:
        """Return the results as plain data."""
        counts = (len(self.tokens), self.prompt_tokens, self.images)
        return Progress(self.finished, self.tokens, *counts)


def choice_of(sequence: SequenceState) -> Choice:
    """Return the sampling parameters of the next token of a sequence."""
    request = sequence.group.request
    if not request.temperature:
        return Choice(0.0, request.top_k, request.top_p, 0.0)
    point = uniform(request.seed, sequence.index, len(sequence.tokens) + sequence.unread)
    return Choice(request.temperature, request.top_k, request.top_p, point)


def sampled(sequence: SequenceState, reason: Literal["stop", "length"]) -> SampledSequence:
    """Return a finished sequence as plain data."""
    k = sequence.group.request.topk_sample_logprobs
    topk = None
    if k:
        ids, logprobs = (
            np.array([pair[part] for pair in sequence.topk]).reshape(-1, k) for part in (0, 1)
        )
        topk = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
    tokens = np.array(sequence.tokens, dtype=np.int32)
    logprobs = np.array(sequence.logprobs, dtype=np.float32)
    experts = None
    if sequence.experts:
        chosen, prompt = np.concatenate(sequence.experts), len(sequence.group.prompt)
        sequence.group.experts = chosen[:prompt]
        # A step that began before the last token was read may have stored that token.
        experts = chosen[prompt : prompt + max(0, len(tokens) - 1)]
    return SampledSequence(tokens, logprobs, reason, topk, experts)


def output_of(group: Group) -> SampleOutput:
    """Return a finished request as plain data; sequences without tokens have the stop reason "length"."""
    scores = group.scores
    return SampleOutput(
        sequences=[
            group.finished.get(index) or sampled(SequenceState(group, index), "length")
            for index in range(group.request.num_samples)
        ],
        prompt_logprobs=scores.logprobs if scores else None,
        topk_prompt=scores.topk if scores else None,
        target_prompt_logprobs=scores.targets if scores else None,
        cached_prompt_tokens=group.cached_prompt_tokens if group.has_begun else 0,
        prompt_routed_experts=group.experts,
    )
