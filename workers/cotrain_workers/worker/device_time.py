"""What the device did with its time: training, the optimizer, sampling, or nothing. All of it adds up to the time there was.

Time is booked in laps: what passed since the last one is one kind's. What was booked never changes, so that a
reader (the heartbeat's thread) sees numbers that only grow, late by one lap at most.

How many tokens a second a worker trains, from what its cycles took, small ones as well. Pure.

A small cycle takes its time for the frozen weights, which are read whatever the number of tokens: its
tokens per second say little of a large one's. So both are estimated, in `seconds = forwards * overhead +
tokens * per_token`, by a Kalman filter: a cycle corrects what it knows about.

Time sharing: the decoder works between micro-batches of training, within its share of the processor.

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
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cotrain_store.errors import Fenced
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.ops import CycleOutput, CyclePart
from cotrain_workers.sampling.service import SamplingService

#: Of how long the shares are that a heartbeat shows.
WINDOW_S = 60.0
#: A visit of the decoder that was shorter had nothing to decode.
_VISIT_S = 0.001


class Phase(StrEnum):
    """What the device does."""

    #: Forward and backward passes; replays, too.
    TRAIN = "train"
    #: Optimizer steps, and copies of saves.
    OPTIM = "optim"
    SAMPLE = "sample"
    #: It waits: for requests, for bodies to be read, for a commit.
    IDLE = "idle"


class DeviceTime:
    """Books the time of one device. For the worker's own thread; `seconds` is for any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_at = clock()
        self._booked = dict.fromkeys(Phase, 0.0)
        self._optim_s = 0.0

    def lap(self, phase: Phase) -> float:
        """Book the time since the last lap, and return it."""
        now = self._clock()
        passed, self._lap_at = now - self._lap_at, now
        if phase is Phase.TRAIN and self._optim_s:
            optim = min(self._optim_s, passed)
            self._optim_s -= optim
            self._booked[Phase.OPTIM] += optim
            self._booked[Phase.TRAIN] += passed - optim
        else:
            self._booked[phase] += passed
        return passed

    def optimized(self, seconds: float) -> None:
        """Say that of the training that is booked next, so much was the optimizer's: it is known at the end."""
        self._optim_s += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Return what was booked since the start, by kind."""
        return {phase.value: seconds for phase, seconds in self._booked.items()}


class CycleTimes:
    """When the parts of one cycle began and ended, by the wall clock; the device's time is booked part by part."""

    def __init__(self, device_time: DeviceTime) -> None:
        """Begin a cycle: the device was idle before."""
        self._device_time = device_time
        device_time.lap(Phase.IDLE)
        self.began = self._last = time.time()
        self._noted: list[CyclePart] = []
        self._visits: list[tuple[float, float]] = []

    def note(self, name: str, phase: Phase = Phase.IDLE) -> None:
        """End a part of this name, which began where the last one ended, and say what the device did."""
        self._device_time.lap(phase)
        now = time.time()
        self._noted.append(CyclePart(name, self._last, now))
        self._last = now

    def visited(self, act: Callable[[], None]) -> Callable[[], None]:
        """Note when this worked, too, which runs at yield points."""

        def noted() -> None:
            began = time.time()
            act()
            ended = time.time()
            if ended - began >= _VISIT_S:
                self._visits = [(self._visits or [(began, ended)])[0], (began, ended)]

        return noted

    def parts(self, cost: CycleOutput | None) -> list[CyclePart]:
        """Give the parts; in place of the run what it consists of, where that is known.

        Sampling lies between its first and its last visit, and works in a part of that time.
        """
        visits = self._visits
        sampling = [CyclePart("sampling", visits[0][0], visits[-1][1])] if visits else []
        if cost is None:
            return [*self._noted, *sampling]
        known = [part for part in self._noted if part.name != "run"]
        return [*known, *cost.parts, *sampling]


class Duty:
    """What part of the last minute each kind took. For one thread."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def shares(self, seconds: dict[str, float], now: float) -> dict[str, float]:
        """Note what was booked until now; return shares that add up to 1, or to 0 before anything was booked."""
        self._seen.append((now, seconds))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        before = self._seen[0][1] if len(self._seen) > 1 else dict.fromkeys(seconds, 0.0)
        taken = {phase: seconds[phase] - before[phase] for phase in seconds}
        total = sum(taken.values())
        return {phase: took / total if total else 0.0 for phase, took in taken.items()}


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
        max_overhead, max_per_token = self._most
        overhead += (_DRIFT * self._overhead_s) ** 2 - to_overhead**2 / total
        per_token += (_DRIFT * self._per_token_s) ** 2 - to_token**2 / total
        self._variance = min(max_overhead, overhead), min(max_per_token, per_token)
        most = _CORRELATION * math.sqrt(self._variance[0] * self._variance[1])
        self._covariance = max(-most, self._covariance - to_overhead * to_token / total)

    @property
    def _most(self) -> tuple[float, float]:
        """Return the largest variances."""
        own = max(self._overhead_s, _OVERHEAD_TOKENS * self._per_token_s)
        return own**2, self._per_token_s**2


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
