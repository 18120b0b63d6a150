"""Flow control of a client's training requests: their size, how many are in flight, and in which order.

A cotrain server receives a pass in one request, so that it adds the whole gradient or nothing. Other servers of
the protocol publish a request size limit, and each request succeeds or fails separately: `chunks_of` and `combine`.

Three classes limit and order requests:

* *InFlightLimit* bounds the memory of requests that the server has not accepted yet; a call beyond it blocks.
* *Dispatch* bounds the bytes and requests that are being sent at once.
* *SendQueue* sends a run's requests in the order of their `seq_id`.

No request overtakes one that a full server rejected:
the server would stay full of requests that wait for the missing one.

Only sizes and order are handled here; `transport/` sends the requests and interprets the responses.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from cotrain.errors import RateLimitError, UnsupportedInput
from cotrain.wire.datums import ForwardBackwardOutput
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.sessions import ClientConfigResponse

T = TypeVar("T")

IN_FLIGHT_BYTES = 256_000_000
IN_FLIGHT_REQUESTS = 10_000
"""Limits of the memory for unaccepted requests. A single call is always allowed, whatever its size."""
DISPATCH_BYTES = 50_000_000
DISPATCH_REQUESTS = 32
"""Default limits of concurrent sending; the server may set the bytes. Each request holds a connection."""
SLOWEST_REFUSAL = 3
"""Cap on the failure count for the delay after a full server: one request of each run, every 2 s."""

_MIB = 1024**2
_HEAD_BYTES = 4096
_FRAME_BYTES = 6
"""Upper bounds of the overhead in bytes: per request, and per datum."""


# ---- Chunks of a pass -----------------------------------------------------------------------------


def chunks_of(datums: Sequence[wire.Datum], config: ClientConfigResponse) -> list[Sequence[wire.Datum]]:
    """Split a pass into the chunks that its server requires; a cotrain server receives it whole.

    Raises UnsupportedInput if it exceeds the limits of a cotrain server for one request.
    """
    most = config.cotrain_max_pass_bytes
    if most is None:
        return [*cut(datums, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)]
    if len(datums) > config.fwdbwd_max_chunk_len:
        raise UnsupportedInput(
            f"data has {len(datums)} datums; one call takes up to {config.fwdbwd_max_chunk_len} here, "
            "because it adds all of its gradient or nothing. Send it in several calls: their "
            "gradients add up"
        )
    size = _HEAD_BYTES + sum(datum.ByteSize() + _FRAME_BYTES for datum in datums)
    if size > most:
        raise UnsupportedInput(
            f"data has {size / _MIB:.1f} MiB; one call takes up to {most / _MIB:.1f} MiB here "
            "(COTRAIN_MAX_BODY_BYTES of the server), because it adds all of its gradient or "
            "nothing. Send it in several calls: their gradients add up"
        )
    return [datums]


def cut(datums: Sequence[wire.Datum], max_datums: int, max_bytes: int) -> list[list[wire.Datum]]:
    """Split datums, in order, into the fewest chunks within both limits; an empty list gives one chunk.

    A single datum over the limit gets its own chunk.
    """
    chunks: list[list[wire.Datum]] = [[]]
    chunk_bytes = 0
    for datum in datums:
        size = datum.ByteSize()
        is_full = len(chunks[-1]) == max_datums or chunk_bytes + size > max_bytes
        if chunks[-1] and is_full:
            chunks.append([])
            chunk_bytes = 0
        chunks[-1].append(datum)
        chunk_bytes += size
    return chunks


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Combine the results of a pass's chunks, in order, into the result of the whole pass.

    The suffix of a metric's name selects the reduction:

    * `:sum`, `:min`, `:max`, and `:mean` weighted by number of datums;
    * `:slack`, the maximum less that mean;
    * `:unique`, every value, as `name`, `name_1`, ….

    Metrics with another suffix, or missing in a chunk, are left out.
    """
    first, *others = outputs
    if not others:
        return first
    metrics: dict[str, float] = {}
    for name in first.metrics:
        if all(name in output.metrics for output in others):
            metrics.update(_combine_metric(name, outputs))
    return ForwardBackwardOutput(
        loss_fn_output_type=first.loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=metrics,
    )


def _combine_metric(name: str, outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    values = [output.metrics[name] for output in outputs]
    weights = [len(output.loss_fn_outputs) for output in outputs]
    kind = name.rpartition(":")[2]
    if kind == "unique":
        return {f"{name}_{number}" if number else name: value for number, value in enumerate(values)}
    if kind not in _REDUCERS:
        return {}
    return {name: _REDUCERS[kind](values, weights)}


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:  # no chunk has datums, so there are no weights
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


_REDUCERS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": _mean,
    "slack": lambda values, weights: max(values) - _mean(values, weights),
}


# ---- Limits and order -----------------------------------------------------------------------------


class InFlightLimit:
    """Memory limit of requests that the server has not accepted. Used from any thread."""

    def __init__(self, must_not_wait: Callable[[], bool] = lambda: False) -> None:
        self._must_not_wait = must_not_wait
        """Returns True on the client's own thread, because that thread calls `release`."""
        self._changed = threading.Condition()
        self._bytes = 0
        self._requests = 0

    def acquire(self, size_bytes: int, requests: int = 1) -> None:
        """Block this thread until the request fits under the limit, and count it.

        Call it before taking a `seq_id`; otherwise the first request of a run could wait for its last.
        """
        with self._changed:
            if not self._must_not_wait():
                self._changed.wait_for(lambda: self._fits(size_bytes, requests))
            self._bytes += size_bytes
            self._requests += requests

    def release(self, size_bytes: int, requests: int = 1) -> None:
        """Stop counting a request, and wake the blocked calls."""
        with self._changed:
            self._bytes -= size_bytes
            self._requests -= requests
            self._changed.notify_all()

    def _fits(self, size_bytes: int, requests: int) -> bool:
        return not self._requests or (
            self._bytes + size_bytes <= IN_FLIGHT_BYTES and self._requests + requests <= IN_FLIGHT_REQUESTS
        )


class Dispatch:
    """Limit on concurrent sending for all runs of a client. Runs on the client's own loop."""

    def __init__(self) -> None:
        self.limit_bytes = DISPATCH_BYTES
        self._bytes = 0
        self._requests = 0
        self._queues: set[SendQueue] = set()
        """Queues with waiting requests."""

    def fits(self, size_bytes: int) -> bool:
        """Return True if a request of this size may be sent now."""
        return self._requests < DISPATCH_REQUESTS and self._bytes + size_bytes <= self.limit_bytes

    def begin(self, size_bytes: int) -> None:
        """Count a request that is being sent."""
        self._bytes += size_bytes
        self._requests += 1

    def end(self, size_bytes: int) -> None:
        """Stop counting a request."""
        self._bytes -= size_bytes
        self._requests -= 1

    def start_from(self, queue: SendQueue) -> None:
        """Start every request that may be sent now, those of this queue first."""
        self._queues.add(queue)
        for each in (queue, *self._queues - {queue}):
            each.start()
            if not each.is_waiting:
                self._queues.discard(each)


class SendQueue:
    """Unaccepted requests of one run, in order. Runs on the client's own loop."""

    def __init__(self, dispatch: Dispatch, pause: Callable[[int, RateLimitError, float], Awaitable[None]]) -> None:
        self._dispatch = dispatch
        self._pause = pause
        self._waiting: list[_Waiting] = []  # a heap
        self._sending: set[int] = set()
        self._refused: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """True if at least one request is not being sent yet."""
        return bool(self._waiting)

    async def send(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        """Send a request in the order of `seq_id`, and retry while the server is full.

        `post` raises RateLimitError if the server is full. All other errors of `post` are raised.
        """
        refusals, began = 0, time.monotonic()
        try:
            while True:
                try:
                    return await self._send_once(seq_id, size_bytes, post)
                except RateLimitError as full:
                    refusals += 1
                    waited_s = time.monotonic() - began
                    await self._pause(min(refusals, SLOWEST_REFUSAL), full, waited_s)
        finally:
            self._refused.discard(seq_id)
            self._dispatch.start_from(self)

    def start(self) -> None:
        """Start the requests that may be sent now."""
        while self._waiting and self._may_start(self._waiting[0]):
            first = heapq.heappop(self._waiting)
            self._sending.add(first.seq_id)
            self._dispatch.begin(first.size_bytes)
            first.started.set()

    async def _send_once(self, seq_id: int, size_bytes: int, post: Callable[[], Awaitable[T]]) -> T:
        request = _Waiting(seq_id, size_bytes, asyncio.Event())
        heapq.heappush(self._waiting, request)
        self._dispatch.start_from(self)
        await request.started.wait()  # only the end of the client cancels it
        try:
            return await post()
        except RateLimitError:
            self._refused.add(seq_id)
            raise
        finally:
            self._sending.discard(seq_id)
            self._dispatch.end(size_bytes)
            self._dispatch.start_from(self)

    def _may_start(self, first: _Waiting) -> bool:
        """Return True if the first waiting request may be sent.

        The run's first unaccepted request is always allowed, because all later ones depend on it.
        """
        if any(refused < first.seq_id for refused in self._refused):
            return False
        is_first_of_all = not any(seq_id < first.seq_id for seq_id in self._sending)
        return is_first_of_all or self._dispatch.fits(first.size_bytes)


class _Waiting(NamedTuple):
    seq_id: int
    size_bytes: int
    started: asyncio.Event
