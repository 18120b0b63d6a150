"""Accounting of device time, throughput estimate, and time sharing of training and sampling."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from cotrain_store.errors import Fenced
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.ops import CycleOutput, CyclePart
from cotrain_workers.results import StepTimes
from cotrain_workers.sampling.service import SamplingService

#: Window in s of the shares that a heartbeat shows.
WINDOW_S = 60.0
#: A shorter visit of the decoder, in s, had nothing to decode.
_VISIT_S = 0.001


class Phase(StrEnum):
    """Use of the device."""

    #: Forward and backward passes, including replays.
    TRAIN = "train"
    #: Optimizer steps, and copies of saves.
    OPTIM = "optim"
    SAMPLE = "sample"
    #: Waiting for requests, for bodies or for a commit.
    IDLE = "idle"


class DeviceTime:
    """Booked time of one device. Only the worker's own thread may book; any thread may read `seconds`.

    Each lap books the time since the previous lap to one phase, so the phases add up to the elapsed time. Booked time
    never changes. The heartbeat's thread therefore reads numbers that only grow, at most one lap late.
    """

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
        """Book these seconds of the next training lap as the optimizer's, because they are measured only at the end."""
        self._optim_s += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds booked since the start, by phase."""
        return {phase.value: seconds for phase, seconds in self._booked.items()}


class CycleTimes:
    """Wall-clock times of the parts of one cycle. Each part is also booked as device time."""

    def __init__(self, device_time: DeviceTime) -> None:
        """Begin a cycle. The device was idle before."""
        self._device_time = device_time
        device_time.lap(Phase.IDLE)
        self.began_s = time.monotonic()
        self.began = self._last = time.time()
        self.sampling_s = 0.0  # time at yield points
        self._noted: list[CyclePart] = []
        self._visits: list[tuple[float, float]] = []

    def note(self, name: str, phase: Phase = Phase.IDLE) -> None:
        """End a part that began where the previous one ended, and book its time to `phase`."""
        self._device_time.lap(phase)
        now = time.time()
        self._noted.append(CyclePart(name, self._last, now))
        self._last = now

    def of_step(self) -> StepTimes:
        """Return the times of the step until now."""
        return StepTimes(self.began, time.monotonic() - self.began_s, self.sampling_s)

    def visited(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return `act` with its times recorded; it runs at yield points."""

        def noted() -> None:
            began = time.time()
            act()
            ended = time.time()
            if ended - began >= _VISIT_S:
                self._visits = [(self._visits or [(began, ended)])[0], (began, ended)]

        return noted

    def parts(self, cost: CycleOutput | None) -> list[CyclePart]:
        """Return the parts, with the run replaced by its own parts if they are known.

        Sampling extends from its first visit to its last, and works in a part of that time.
        """
        visits = self._visits
        sampling = [CyclePart("sampling", visits[0][0], visits[-1][1])] if visits else []
        if cost is None:
            return [*self._noted, *sampling]
        known = [part for part in self._noted if part.name != "run"]
        return [*known, *cost.parts, *sampling]


class Duty:
    """Share of each phase in the last minute. For one thread."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def shares(self, seconds: dict[str, float], now: float) -> dict[str, float]:
        """Add the booked time until now. Return shares that add up to 1, or to 0 before anything was booked."""
        self._seen.append((now, seconds))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        before = self._seen[0][1] if len(self._seen) > 1 else dict.fromkeys(seconds, 0.0)
        taken = {phase: seconds[phase] - before[phase] for phase in seconds}
        total = sum(taken.values())
        return {phase: took / total if total else 0.0 for phase, took in taken.items()}


#: Upper bounds of the uncertainty: the time of 512 tokens for the overhead, 100 % for the time per
#: token.
_OVERHEAD_TOKENS = 512
#: Relative deviation of a cycle from the line, and relative drift of the line from cycle to cycle.
_NOISE, _DRIFT = 0.2, 0.2
#: Limit of the correlation, so that every cycle corrects both estimates.
_CORRELATION = 0.8
_LEAST_PER_TOKEN_S = 1e-9


class Throughput:
    """Current estimate of trained tokens per second, from all cycles.

    A small cycle spends its time on reading the frozen weights, whatever its number of tokens. Its tokens per second
    therefore do not predict a large cycle's. A Kalman filter estimates both parts of
    `seconds = forwards * overhead + tokens * per_token`.
    """

    def __init__(self, tokens_per_s: float) -> None:
        """Start from a rate that was measured or guessed before any cycle."""
        self._overhead_s, self._per_token_s = 0.0, 1 / tokens_per_s
        self._variance, self._covariance = self._most, 0.0

    def tokens_per_s(self, micro_batch_tokens: int) -> float:
        """Return the rate of cycles with full micro-batches."""
        return 1 / (self._per_token_s + self._overhead_s / micro_batch_tokens)

    def measure(self, forwards: int, tokens: int, seconds: float) -> None:
        """Update the estimate with one cycle."""
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
        """Upper bounds of the variances."""
        own = max(self._overhead_s, _OVERHEAD_TOKENS * self._per_token_s)
        return own**2, self._per_token_s**2


#: Training counts as busy between two steps if the second begins within this time in s.
GAP_S = 0.1


@dataclass
class Share:
    """Credit of the decoder, which works between micro-batches of training.

    While both have work, a second of training earns the decoder `s / (1 - s)` seconds, to use before training
    continues. A decode step cannot be interrupted, so it may overdraw the credit by one step, and training is paid back
    first. Credit that the decoder has no work for is not saved.

    Bounds for any interval in which both have work, with T seconds of training and D of decoding. The longest decode
    step is d, and the longest training time between two visits is t:

    * `T >= (1 - s) * (T + D - d)`: training keeps its share, up to one decode step.
    * `D >= s * (T + D - t)`: the decoder keeps its share, up to one uninterrupted part of training.
    """

    sampling_share: float
    """The decoder's share `s` of the time, `0 <= s < 1`. With 0 it runs only while training is idle."""
    credit_s: float = 0.0
    """Remaining credit in s; negative after a decode step that took longer than the credit."""

    @property
    def may_decode(self) -> bool:
        """True if the decoder may run one more step before training continues."""
        return self.credit_s > 0

    def trained(self, seconds: float) -> None:
        """Add the credit for this training time."""
        self.credit_s += seconds * self.sampling_share / (1 - self.sampling_share)

    def decoded(self, seconds: float) -> None:
        """Subtract decoding time for which training waited."""
        self.credit_s -= seconds

    def forfeit(self) -> None:
        """Drop unused credit, because the decoder has nothing to do. An overdraft stays."""
        self.credit_s = min(0.0, self.credit_s)


@dataclass
class TimeSharing:
    """Measurement of training and decoding time, and of the decoder's turns."""

    sampler: SamplingService
    share: Share
    stopping: threading.Event
    device_time: DeviceTime
    _trained_until: float = 0.0
    _idle_since: float = -math.inf
    _decoded_idle_s: float = 0.0

    def training_begins(self) -> None:
        """Start to count time as training."""
        self._trained_until = time.monotonic()
        if self._trained_until - self._idle_since < GAP_S:
            self.share.decoded(self._decoded_idle_s)

    def training_ends(self) -> None:
        """Mark training as idle, unless the next step begins within GAP_S."""
        self._idle_since = time.monotonic()
        self.share.trained(self._idle_since - self._trained_until)
        self._decoded_idle_s = 0.0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count and book the time in this context as training, for work outside a step."""
        self.training_begins()
        self.device_time.lap(Phase.IDLE)
        try:
            yield
        finally:
            self.device_time.lap(Phase.TRAIN)
            self.training_ends()

    def decode_while_idle(self) -> bool:
        """Decode a step while no training is open. Return False if there was nothing to decode."""
        began = time.monotonic()
        self.device_time.lap(Phase.IDLE)
        worked = self._advance()
        self._decoded_idle_s += time.monotonic() - began
        return worked

    def yield_to_decoder(self) -> None:
        """Decode while there is credit. This is a yield point of training, when the model is free.

        Errors are suppressed here. The commit of the current step meets an unavailable Redis or a
        successor again; the next decode step meets an unreadable file again.
        """
        now = time.monotonic()
        self.device_time.lap(Phase.TRAIN)
        self.share.trained(now - self._trained_until)
        with contextlib.suppress(Fenced, OSError, *CONNECTION_LOST):
            while self.share.may_decode and not self.stopping.is_set():
                worked = self._advance()
                before, now = now, time.monotonic()
                self.share.decoded(now - before)
                if not worked:
                    self.share.forfeit()
        self._trained_until = time.monotonic()

    def _advance(self) -> bool:
        worked = self.sampler.advance()
        self.device_time.lap(Phase.SAMPLE if worked else Phase.IDLE)
        return worked
