"""Ordered requests of one run.

Each request takes its `seq_id`, its position in the run's order, when it is created. The server waits for every
`seq_id`, so an empty forward is sent in place of a request that fails before it is accepted.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message
from pydantic import BaseModel
from typing_extensions import override

from cotrain.errors import APIError, RateLimitError
from cotrain.requests.background_loop import check_not_forked
from cotrain.requests.chunks import chunks_of, combine, cut
from cotrain.requests.connection import Connection
from cotrain.requests.flow_control import SendQueue
from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_pass, wait_for_result
from cotrain.transport.http import Transport
from cotrain.transport.responses import is_transient, reader
from cotrain.wire.codec import encode_datums, wrap_datums
from cotrain.wire.datums import Datum, ForwardBackwardOutput, total_weight
from cotrain.wire.model import SequencedRequest
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import UntypedAPIFuture

POLLS_AT_ONCE = 16
"""Maximum number of a run's futures that are polled at once; each poll holds a connection."""
SMALL_BYTES = 1_000
"""Size that the limits count for a JSON request."""

T = TypeVar("T")
Accepted = TypeVar("Accepted")
Result = TypeVar("Result", bound="BaseModel")


class CustomPass(Protocol):
    """Custom loss, computed on the client between its forward and its backward."""

    def datums(self, forward: ForwardBackwardOutput) -> Sequence[Datum]:
        """Return the backward's datums, one for each of the forward; called on a separate thread."""

    def finish(self, backward: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Return the caller's result, from the output of the backward."""


class RunRequests:
    """Sender of a run's requests; assigns their `seq_id`s."""

    def __init__(self, connection: Connection, model_id: str) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._transport = connection.transport
        self._in_flight = connection.in_flight
        self.queue = SendQueue(connection.dispatch, connection.transport.pause)
        self.model_id = model_id
        self._ordering = threading.Lock()
        self._pid = os.getpid()
        self._next_seq_id = 1
        self._lost = set[int]()
        """Positions of abandoned requests that the server may not have received."""
        self._polls = asyncio.Semaphore(POLLS_AT_ONCE)
        self._undone = set[object]()
        """Outcomes that are still pending."""

    @override
    def __repr__(self) -> str:
        return f"run {self.model_id}, {self._next_seq_id - 1} sent, {len(self._undone)} not done"

    def post(
        self, path: str, request: type[SequencedRequest], answer: type[Result], /, **fields: Any
    ) -> Future[Result]:
        """POST the run's next request, of type `request` with these fields; its result is the JSON of `answer`.

        Raises ValidationError for invalid fields.
        """

        async def wait(request_ids: list[str]) -> Result:
            (request_id,) = request_ids
            return await self._polled(partial(wait_for_result, result=answer), request_id)

        # Validated before a `seq_id` is taken, so that an invalid request leaves no gap.
        return self._send(path, [request(model_id=self.model_id, seq_id=1, **fields)], wait)

    def send_pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        """POST a forward or forward_backward as the run's next, in as many chunks as its server requires.

        Raises UnsupportedInput for a datum that is not text, or for too much data in one call.
        """
        # Encoded here, so that later changes by the caller have no effect. This happens before a
        # `seq_id` is taken, so that a datum that cannot be encoded leaves no gap.
        requests = [
            wrap_datums(self.model_id, 1, chunk, loss_fn, loss_fn_config, forward_only=forward_only)
            for chunk in self._cut(data)
        ]
        self._connection.warn_of_unshifted(data)
        weight_sum = total_weight(data) if loss_fn == "cross_entropy" else 0.0

        async def wait(request_ids: list[str]) -> ForwardBackwardOutput:
            return (await self._pass_result(request_ids)).with_total_weight(weight_sum)

        method = "forward" if forward_only else "forward_backward"
        return self._send("forward_backward", requests, wait, method)

    def send_forwards(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None
    ) -> list[Future[ForwardBackwardOutput]]:
        """POST forwards as the run's next requests, in parts as large as the server's chunk size.

        Raises UnsupportedInput for a datum that is not text.
        """
        config = self._connection.known_config
        parts = cut(encode_datums(data), config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)
        requests = [wrap_datums(self.model_id, 1, part, loss_fn, loss_fn_config, forward_only=True) for part in parts]
        return [self._send("forward_backward", [each], self._pass_result) for each in requests]

    def send_custom_pass(self, data: Sequence[Datum], custom: CustomPass) -> Future[ForwardBackwardOutput]:
        """POST a forward and, once `custom` has processed its result, a backward with as many datums.

        Both have their `seq_id`s before this returns, so later requests of the run come after both.
        Raises UnsupportedInput for a datum that is not text, or for too much data in one call.
        """
        chunks = self._cut(data)
        forwards = [self._cross_entropy(1, chunk, forward_only=True) for chunk in chunks]
        accepted, seq_ids = self._start("forward_backward", forwards, seq_ids_each=2)
        work = self._loop.start(self._second_pass(accepted, custom, seq_ids[len(chunks) :], [len(c) for c in chunks]))
        what = f"custom pass {seq_ids.start} of run {self.model_id}"
        return Future(accepted, self._loop.start(_shielded(work)), what=what)

    # ---- For requests of several runs, which `sweep_requests.py` sends ---------------------------------

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Hold the order of this run: nothing else is numbered or queued in the block."""
        check_not_forked(self._pid)
        with self._ordering:
            yield

    def reserve(self, count: int) -> range:
        """Return the run's next `seq_id`s. The caller holds the order and starts to send in it."""
        first = self._next_seq_id
        self._next_seq_id += count
        return range(first, self._next_seq_id)

    def result_of(
        self,
        accepted: concurrent.futures.Future[str],
        wait: Callable[[Transport, str], Coroutine[Any, Any, T]],
        what: str,
    ) -> Future[T]:
        """Return the future of a request that is sent elsewhere, by the future of its request id."""
        outcome = self._outcome(accepted, partial(self._polled, wait))
        return Future(accepted, outcome, what=f"{what} of run {self.model_id}")

    async def fill(self, seq_id: int, *, is_abandoned: bool) -> None:
        """Send an empty request in place of one that failed. Otherwise the server would block all later ones.

        An abandoned request may have been lost, and later ones may already wait for it. So the empty one is tried
        only once. If it may be lost too, the next request sends it first.
        """
        if is_abandoned:
            self._lost.add(seq_id)
        post = self._transport.post_once if is_abandoned else self._transport.post
        try:
            await post("forward_backward", self._empty_pass(seq_id), reader(UntypedAPIFuture))
        except APIError as error:
            if is_transient(error):
                self._lost.add(seq_id)
                return
        self._lost.discard(seq_id)

    async def fill_lost(self) -> None:
        """Fill the `seq_id`s of abandoned requests, because the server may not have received them."""
        for seq_id in sorted(self._lost):
            try:
                await self._accepted("forward_backward", self._empty_pass(seq_id))
            except APIError as error:
                if is_transient(error):
                    raise
                # The server has already received this request.
            self._lost.discard(seq_id)

    # ---- Sending ---------------------------------------------------------------------------------------

    def _send(
        self,
        path: str,
        requests: Sequence[SequencedRequest | Message],
        wait: Callable[[list[str]], Coroutine[Any, Any, T]],
        method: str | None = None,
    ) -> Future[T]:
        """Start to send requests, and return the future of `wait`, which receives their request ids."""
        accepted, seq_ids = self._start(path, requests)
        what = f"{method or path} {seq_ids.start} of run {self.model_id}"
        return Future(accepted, self._outcome(accepted, wait), what=what)

    def _start(
        self, path: str, requests: Sequence[SequencedRequest | Message], seq_ids_each: int = 1
    ) -> tuple[concurrent.futures.Future[list[str]], range]:
        """Reserve the run's next `seq_id`s and start to send, in that order.

        With more `seq_id`s than requests, the requests use the first ones. Blocks at the in-flight limit
        (`flow_control.py`).
        """
        check_not_forked(self._pid)
        size_bytes = sum(map(_size, requests))
        self._in_flight.acquire(size_bytes, len(requests))
        with self._ordering:
            seq_ids = self.reserve(len(requests) * seq_ids_each)
            numbered = [_numbered(seq_ids[i], request) for i, request in enumerate(requests)]
            accepted = self._loop.start(self._submit(path, numbered, size_bytes))
        return accepted, seq_ids

    async def _submit(self, path: str, requests: Sequence[Any], size_bytes: int) -> list[str]:
        """POST every request (the server orders them); returns their request ids."""
        try:
            answers = await asyncio.gather(
                *(
                    self.queue.send(request.seq_id, _size(request), partial(self._post, path, request))
                    for request in requests
                ),
                return_exceptions=True,
            )
        finally:
            self._in_flight.release(size_bytes, len(requests))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, str)]

    async def _post(self, path: str, request: Any) -> str:
        """POST one request; returns its request id. On an error other than RateLimitError, fill its `seq_id`."""
        try:
            await self.fill_lost()
            return await self._accepted(path, request, raises_busy=True)
        except RateLimitError:
            raise
        except APIError as error:
            await self.fill(request.seq_id, is_abandoned=is_transient(error))
            raise

    async def _accepted(self, path: str, request: Any, *, raises_busy: bool = False) -> str:
        future = await self._transport.post(path, request, reader(UntypedAPIFuture), raises_busy=raises_busy)
        return future.request_id

    def _empty_pass(self, seq_id: int) -> wire.ForwardBackwardRequest:
        return self._cross_entropy(seq_id, [], forward_only=True)

    def _outcome(
        self, accepted: concurrent.futures.Future[Accepted], wait: Callable[[Accepted], Coroutine[Any, Any, T]]
    ) -> concurrent.futures.Future[T]:
        """Start to wait for acceptance and then for the result, which counts as not done until then."""

        async def finish() -> T:
            return await wait(await _shielded(accepted))

        outcome = self._loop.start(finish())
        self._undone.add(outcome)
        outcome.add_done_callback(self._undone.discard)
        return outcome

    async def _second_pass(
        self,
        accepted: concurrent.futures.Future[list[str]],
        custom: CustomPass,
        seq_ids: range,
        chunk_lengths: Sequence[int],
    ) -> ForwardBackwardOutput:
        try:
            request_ids = await asyncio.wrap_future(accepted)
            # Outside the limit of the run's other polls. Those may all poll requests that wait for the
            # backward, which itself waits for this forward.
            outputs = await asyncio.gather(*(wait_for_pass(self._transport, request_id) for request_id in request_ids))
            datums = encode_datums(await asyncio.to_thread(custom.datums, combine(outputs)))
        except Exception:  # also any exception of the caller's loss
            await asyncio.gather(*(self.fill(seq_id, is_abandoned=False) for seq_id in seq_ids))
            raise
        # Split like the forward, whatever the sizes are now, because that many `seq_id`s were taken.
        remaining = iter(datums)
        requests = [
            self._cross_entropy(seq_id, list(islice(remaining, length)), forward_only=False)
            for seq_id, length in zip(seq_ids, chunk_lengths, strict=True)
        ]
        size_bytes = sum(map(_size, requests))
        self._in_flight.acquire(size_bytes, len(requests))
        backward_ids = await self._submit("forward_backward", requests, size_bytes)
        return custom.finish(await self._pass_result(backward_ids))

    def _cut(self, data: Sequence[Datum]) -> list[Sequence[wire.Datum]]:
        return chunks_of(encode_datums(data), self._connection.known_config)

    def _cross_entropy(
        self, seq_id: int, chunk: Sequence[wire.Datum], *, forward_only: bool
    ) -> wire.ForwardBackwardRequest:
        return wrap_datums(self.model_id, seq_id, chunk, "cross_entropy", None, forward_only=forward_only)

    async def _pass_result(self, request_ids: list[str]) -> ForwardBackwardOutput:
        outputs = await asyncio.gather(*(self._polled(wait_for_pass, request_id) for request_id in request_ids))
        return combine(outputs)

    async def _polled(self, poll: Callable[[Transport, str], Coroutine[Any, Any, T]], request_id: str) -> T:
        # First come, first served: results arrive in about the order of acceptance.
        async with self._polls:
            return await poll(self._transport, request_id)


async def _shielded(work: concurrent.futures.Future[T]) -> T:
    """Wait for work that continues if its waiter is cancelled, because it leaves no gap in the order of the run."""
    return await asyncio.shield(asyncio.wrap_future(work))


def _size(request: BaseModel | Message) -> int:
    """Return the bytes of a request before compression; SMALL_BYTES for a JSON request."""
    return SMALL_BYTES if isinstance(request, BaseModel) else request.ByteSize()


def _numbered(seq_id: int, request: SequencedRequest | Message) -> SequencedRequest | Message:
    """Return the request with its `seq_id` set."""
    if isinstance(request, SequencedRequest):
        return request.model_copy(update={"seq_id": seq_id})
    request.seq_id = seq_id  # type: ignore[attr-defined]  # of the message of a pass
    return request
