"""Four kinds of tenants, as a training loop may be written: each run is a loop of its own.

A run is a list of requests that it has sent and not got back, and a rule what it sends next. Pure:
what comes back goes in, what is sent comes out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cotrain_store.messages.ops import OpKind

#: One request after another · forward_backward and optim_step together · two such steps in flight,
#: so that there always is a next request · eight steps at once, then a rest.
KINDS = ("naive", "submit-both", "pipelined", "burst")
STEPS_AT_ONCE = {"naive": 1, "submit-both": 1, "pipelined": 2, "burst": 8}
#: What a forward_backward has in tokens; an optim_step has none.
TOKENS = (200, 1_800)
#: From a result to the next request, in s; of a burst, from its last result to the next burst.
THINKS_S = dict.fromkeys(KINDS, (0.001, 0.02)) | {"burst": (0.1, 2.0)}


@dataclass(frozen=True)
class Request:
    """One request of a run, not sent yet."""

    kind: OpKind
    tokens: int


@dataclass
class Loop:
    """The training loop of one run."""

    kind: str
    draw: random.Random
    in_flight: int = 0
    _next_is_step: bool = field(default=False, init=False)

    def sends(self) -> list[Request]:
        """What the loop sends now; empty while it waits for results."""
        if self.kind == "naive":
            return [] if self.in_flight else [self._alternate()]
        steps = STEPS_AT_ONCE[self.kind]
        if self.kind == "burst":
            steps = 0 if self.in_flight else steps
        else:
            steps -= -(-self.in_flight // 2)  # a step is in flight until both its requests are back
        return [request for _ in range(steps) for request in (self._pass(), _STEP)]

    def thinks_s(self) -> float:
        """How long the loop takes from a result to its next request."""
        return self.draw.uniform(*THINKS_S[self.kind])

    def _alternate(self) -> Request:
        self._next_is_step = not self._next_is_step
        return self._pass() if self._next_is_step else _STEP

    def _pass(self) -> Request:
        return Request(OpKind.FORWARD_BACKWARD, self.draw.randint(*TOKENS))


_STEP = Request(OpKind.OPTIM_STEP, 0)
