"""Let the decoder work beside training: between micro-batches, within its share of the processor."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from cotrain_store.errors import Fenced
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    import threading

    from cotrain_workers.sampling.service import SamplingService
    from cotrain_workers.worker.share import Share


#: A step that begins so soon after another was on its way when that ended: training did not rest.
ROAD_S = 0.1


class Beside:
    """Measures what training takes and what the decoder takes, and gives each its turn."""

    def __init__(self, sampler: SamplingService, share: Share, stopping: threading.Event) -> None:
        self._sampler = sampler
        self._share = share
        self._stopping = stopping
        self._trained_until = 0.0
        self._rests_since = -math.inf
        self._decoded_at_rest = 0.0

    def training_begins(self) -> None:
        """From here on time is training's."""
        self._trained_until = time.monotonic()
        if self._trained_until - self._rests_since < ROAD_S:
            self._share.decoded(self._decoded_at_rest)

    def training_ends(self) -> None:
        """From here on nobody waits for the decoder, unless the next step is on its way."""
        self._rests_since = time.monotonic()
        self._share.trained(self._rests_since - self._trained_until)
        self._decoded_at_rest = 0.0

    def rest(self) -> bool:
        """Decode a step while no training is open; False when there was nothing to decode."""
        began = time.monotonic()
        worked = self._sampler.advance()
        self._decoded_at_rest += time.monotonic() - began
        return worked

    def between(self) -> None:
        """Decode while there is credit; to be called when the model is free.

        A Redis that is away, or a successor, is met again by the commit of what is being trained; a
        file that cannot be read now, by the next turn.
        """
        now = time.monotonic()
        self._share.trained(now - self._trained_until)
        with contextlib.suppress(Fenced, OSError, *CONNECTION_LOST):
            while self._share.may_decode and not self._stopping.is_set():
                worked = self._sampler.advance()
                before, now = now, time.monotonic()
                self._share.decoded(now - before)
                if not worked:
                    self._share.forfeit()
        self._trained_until = time.monotonic()
