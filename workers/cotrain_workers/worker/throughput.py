"""How many tokens a second a worker trains, from what its cycles took, small ones as well. Pure.

A small cycle takes its time for the frozen weights, which are read whatever the number of tokens: its
tokens per second say little of a large one's. So both are estimated, in `seconds = forwards * overhead +
tokens * per_token`, by a Kalman filter: a cycle corrects what it knows about.
"""

from __future__ import annotations

import math

#: The overhead is uncertain by the time of so many tokens, the time of a token by all of it: no further.
_OVERHEAD_TOKENS = 512
#: How far a cycle's time may lie from the line, and how far the line may move from one cycle to the next.
_NOISE, _DRIFT = 0.2, 0.2
#: No two cycles are so alike that nothing is learnt of one of both.
_CORRELATION = 0.8
_LEAST_PER_TOKEN_S = 1e-9


class Throughput:
    """What is known so far."""

    def __init__(self, tokens_per_s: float) -> None:
        """Begin with what was measured, or guessed, before any cycle."""
        self._overhead_s, self._per_token_s = 0.0, 1 / tokens_per_s
        self._variance, self._covariance = self._most, 0.0

    def tokens_per_s(self, micro_batch_tokens: int) -> float:
        """Return the rate of cycles whose micro-batches are full."""
        return 1 / (self._per_token_s + self._overhead_s / micro_batch_tokens)

    def measure(self, forwards: int, tokens: int, seconds: float) -> None:
        """Learn what one cycle took."""
        if not (forwards and tokens and seconds > 0):
            return
        expected = forwards * self._overhead_s + tokens * self._per_token_s
        overhead, per_token = self._variance
        to_overhead = forwards * overhead + tokens * self._covariance
        to_token = forwards * self._covariance + tokens * per_token
        noise = (_NOISE * max(seconds, expected)) ** 2
        total = forwards * to_overhead + tokens * to_token + noise
        surprise = (seconds - expected) / total
        self._overhead_s = max(0.0, self._overhead_s + to_overhead * surprise)
        self._per_token_s = max(_LEAST_PER_TOKEN_S, self._per_token_s + to_token * surprise)
        most_overhead, most_per_token = self._most
        overhead += (_DRIFT * self._overhead_s) ** 2 - to_overhead**2 / total
        per_token += (_DRIFT * self._per_token_s) ** 2 - to_token**2 / total
        self._variance = min(most_overhead, overhead), min(most_per_token, per_token)
        most = _CORRELATION * math.sqrt(self._variance[0] * self._variance[1])
        self._covariance = max(-most, self._covariance - to_overhead * to_token / total)

    @property
    def _most(self) -> tuple[float, float]:
        """Return the largest variances."""
        own = max(self._overhead_s, _OVERHEAD_TOKENS * self._per_token_s)
        return own**2, self._per_token_s**2
