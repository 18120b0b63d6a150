"""Input and output of a decoder as plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from cotrain_workers.engine.ops import Failure, Image

# Decodes the generated tokens of one sequence to text. Bytes of an incomplete character at either end
# become replacement characters.
TextOf = Callable[[Sequence[int]], str]

NO_TOP_K = -1
NOT_COMPUTED_LOGPROB = -99999.0


class GrammarUnusable(ValueError):
    """The grammar is invalid or exceeds a limit."""


class Grammar(Protocol):
    """Position of one sequence in a grammar of its text."""

    def allowed(self) -> np.ndarray:
        """Return the tokens that may follow: bool `[V]`."""

    def advance(self, token: int) -> bool:
        """Read a token. Return False if the grammar has no continuation."""

    @property
    def failure(self) -> str:
        """Reason why the grammar has no continuation."""


# Returns the start of a grammar for a vocabulary of some size, with the tokens that may end its text.
# Raises GrammarUnusable.
GrammarOf = Callable[[str, int, frozenset[int]], Grammar]


@dataclass(frozen=True)
class SampleRequest:
    """Generate `num_samples` continuations of one prompt of `P` tokens with one set of weights."""

    id: str
    weights: str | None  # key of the sampler weights; None is the base model alone
    prompt: np.ndarray  # int64 [P], P >= 1
    num_samples: int
    max_tokens: int | None  # None: up to the end of the context
    temperature: float  # 0 is greedy
    top_k: int  # NO_TOP_K: off
    top_p: float
    seed: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    topk_sample_logprobs: int
    prompt_logprobs_last_n: int | None  # None: the whole prompt
    target_prompt_logprobs: np.ndarray | None  # int64 [P - 1, K]: tokens at 1..P-1; -1 is skipped
    # Prompt pages are shared only within one tenant, because a cache hit reveals an earlier prompt.
    tenant: str = ""
    # A tenant of weight 2 gets twice the tokens of one of weight 1. The newest request sets the weight.
    tenant_weight: float = 1.0
    grammar: str | None = None  # holds the generated text; None: any text
    return_routed_experts: bool = False
    images: Sequence[Image] = ()  # of the prompt, in order
    policy_step: int | None = None  # optimizer steps before the weights; only for the result

    @property
    def scores_prompt(self) -> bool:
        """True if any log-probability of the prompt is requested."""
        wanted = self.prompt_logprobs or self.topk_prompt_logprobs > 0
        return wanted or self.target_prompt_logprobs is not None


@dataclass(frozen=True)
class TopK:
    """The `k` most probable tokens at each of `n` positions, most probable first."""

    token_ids: np.ndarray  # int32 [n, k]
    logprobs: np.ndarray  # float32 [n, k]


@dataclass(frozen=True)
class SampledSequence:
    """One continuation; its last tokens are those that stopped it."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], of the raw model: before temperature, top_k and top_p
    stop_reason: Literal["stop", "length"]
    topk: TopK | None
    routed_experts: np.ndarray | None = None
    """Experts of the tokens before the last, int16 `[n - 1, layers, k]`; None if not requested."""


@dataclass(frozen=True)
class SampleOutput:
    """Continuations of a request and the requested scores of its prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None  # float32 [P]; NaN where not computed, [0] always
    topk_prompt: TopK | None  # [P, k]; token 0 and NOT_COMPUTED_LOGPROB where not computed
    target_prompt_logprobs: np.ndarray | None  # float32 [P - 1, K]; NaN where skipped
    cached_prompt_tokens: int  # prompt tokens whose keys and values came from earlier requests
    prompt_routed_experts: np.ndarray | None = None
    """Experts of the prompt, int16 `[P, layers, k]`; None if not requested, or if no token is generated."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a sequence gained in one step; it had `offset` tokens before."""

    request: str
    sequence: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class StepResults:
    """Results of one step, collected while it runs."""

    finished: list[tuple[str, SampleOutput | Failure]] = field(default_factory=list)
    tokens: list[NewTokens] = field(default_factory=list)
    decoded_tokens: int = 0
    prompt_tokens: int = 0  # computed, not cached
    images: int = 0  # computed by the vision tower
