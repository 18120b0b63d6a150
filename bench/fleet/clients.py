"""Four kinds of training loops of tenants; each run has its own loop.

A loop counts its requests in flight and decides which ones to send next. Pure: results are counted by the caller.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cotrain_store.messages.ops import OpKind

#: One request after another; forward_backward and optim_step together; two such steps in flight, so that
#: there is always a next request; eight steps at once, then a pause.
KINDS = ("naive", "submit-both", "pipelined", "burst")
STEPS_AT_ONCE = {"naive": 1, "submit-both": 1, "pipelined": 2, "burst": 8}
#: Range of the tokens of a forward_backward; an optim_step has none.
TOKENS = (200, 1_800)
#: Range of the time from a result to the next request, in s; for a burst, from its last result to the next burst.
THINKS_S = dict.fromkeys(KINDS, (0.001, 0.02)) | {"burst": (0.1, 2.0)}


@dataclass(frozen=True)
class Request:
    """One request of a run that has not been sent."""

    kind: OpKind
    tokens: int


@dataclass
class Loop:
    """Training loop of one run."""

    kind: str
    draw: random.Random
    in_flight: int = 0
    _next_is_step: bool = field(default=False, init=False)

    def sends(self) -> list[Request]:
        """Return the requests to send now; empty while the loop waits for results."""
        if self.kind == "naive":
            return [] if self.in_flight else [self._alternate()]
        steps = STEPS_AT_ONCE[self.kind]
        if self.kind == "burst":
            steps = 0 if self.in_flight else steps
        else:
            steps -= -(
                -self.in_flight // 2
            )  # a step is in flight until both its requests have returned
        return [request for _ in range(steps) for request in (self._pass(), _STEP)]

    def thinks_s(self) -> float:
        """Return the time from a result to the next request, in s."""
        return self.draw.uniform(*THINKS_S[self.kind])

    def _alternate(self) -> Request:
        self._next_is_step = not self._next_is_step
        return self._pass() if self._next_is_step else _STEP

    def _pass(self) -> Request:
        return Request(OpKind.FORWARD_BACKWARD, self.draw.randint(*TOKENS))


_STEP = Request(OpKind.OPTIM_STEP, 0)
