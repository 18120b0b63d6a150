"""How many tokens a second sample requests get while there is work for them, training in between included. Pure."""

from __future__ import annotations

import math

#: What was seen so long ago counts for a third of what is seen now.
MEMORY_S = 10.0


class DecodeRate:
    """What the steps of a decoder came to."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """Prompts and continuations; 0 before the first step. Any thread may look."""
        self._tokens = self._seconds = 0.0
        self._since: float | None = None
        """When the last step ended, if there was always work since then."""

    def rest(self) -> None:
        """Note that there is no work: the time until the next step is no request's wait."""
        self._since = None

    def step(self, tokens: int, began: float, ended: float) -> None:
        """Count a step; where there was work before it, also the time in which it waited for the step."""
        seconds = ended - (began if self._since is None else self._since)
        self._since = ended
        kept = math.exp(-seconds / MEMORY_S)
        self._tokens, self._seconds = self._tokens * kept + tokens, self._seconds * kept + seconds
        if self._seconds > 0:
            self.tokens_per_s = self._tokens / self._seconds
