"""Time sharing: the decoder works between micro-batches of training, within its share of the processor.

The policy (`Share`) is pure: seconds in, a yes or no out. While both have work, a second of training
earns the decoder `s / (1 - s)` seconds, which it may use before training goes on. One decode step cannot be cut short, so it may overdraw by one; that
belongs to training and is paid back first. What the decoder has no work for is not saved up.

So, of any stretch in which both have work, with T seconds of training and D of decoding, d the longest
decode step and t the longest stretch of training between two visits:

    T >= (1 - s) * (T + D - d)    training keeps its share, up to one decode step
    D >= s * (T + D - t)          and so does the decoder, up to one stretch of training
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.errors import Fenced
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.worker.device_time import Phase

if TYPE_CHECKING:
    import threading

    from cotrain_workers.sampling.service import SamplingService
    from cotrain_workers.worker.device_time import DeviceTime


#: A step that begins so soon after another was on its way when that ended: training was not idle.
GAP_S = 0.1


class TimeSharing:
    """Measures what training takes and what the decoder takes, and runs the decoder when it may run."""

    def __init__(
        self,
        sampler: SamplingService,
        share: Share,
        stopping: threading.Event,
        device_time: DeviceTime,
    ) -> None:
        self._sampler = sampler
        self._share = share
        self._stopping = stopping
        self._device_time = device_time
        self._trained_until = 0.0
        self._idle_since = -math.inf
        self._decoded_idle_s = 0.0

    def training_begins(self) -> None:
        """From here on time is training's."""
        self._trained_until = time.monotonic()
        if self._trained_until - self._idle_since < GAP_S:
            self._share.decoded(self._decoded_idle_s)

    def training_ends(self) -> None:
        """Training is idle from now on, unless the next step is on its way."""
        self._idle_since = time.monotonic()
        self._share.trained(self._idle_since - self._trained_until)
        self._decoded_idle_s = 0.0

    def decode_while_idle(self) -> bool:
        """Decode a step while no training is open; False when there was nothing to decode."""
        began = time.monotonic()
        self._device_time.lap(Phase.IDLE)
        worked = self._advance()
        self._decoded_idle_s += time.monotonic() - began
        return worked

    def yield_to_decoder(self) -> None:
        """Decode while there is credit; a yield point of training, when the model is free.

        The commit of what is being trained meets an unavailable Redis, or a successor, again; the next
        decode step, a file that cannot be read now.
        """
        now = time.monotonic()
        self._device_time.lap(Phase.TRAIN)
        self._share.trained(now - self._trained_until)
        with contextlib.suppress(Fenced, OSError, *CONNECTION_LOST):
            while self._share.may_decode and not self._stopping.is_set():
                worked = self._advance()
                before, now = now, time.monotonic()
                self._share.decoded(now - before)
                if not worked:
                    self._share.forfeit()
        self._trained_until = time.monotonic()

    def _advance(self) -> bool:
        worked = self._sampler.advance()
        self._device_time.lap(Phase.SAMPLE if worked else Phase.IDLE)
        return worked


@dataclass
class Share:
    """What the decoder may use now."""

    sampling_share: float
    """The decoder's part `s` of the time, `0 <= s < 1`; with 0 it runs only while training is idle."""
    credit_s: float = 0.0
    """Below zero after a decode step that took longer than what was left."""

    @property
    def may_decode(self) -> bool:
        """Tell whether the decoder may take one more step before training goes on."""
        return self.credit_s > 0

    def trained(self, seconds: float) -> None:
        """Count what training took."""
        self.credit_s += seconds * self.sampling_share / (1 - self.sampling_share)

    def decoded(self, seconds: float) -> None:
        """Count what the decoder took while training had to wait."""
        self.credit_s -= seconds

    def forfeit(self) -> None:
        """Forget what the decoder could still use: it has nothing to do. What it overdrew stays."""
        self.credit_s = min(0.0, self.credit_s)
