"""Requests for several runs at once: one batch is encoded and sent once for all of them.

Each run reserves a `seq_id` of its own. So its order, back-pressure and results are those of a separate request.
"""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os.path import commonprefix
from typing import Generic, NamedTuple, TypeVar

from cotrain.errors import APIError, MalformedMessage, RateLimitError, UnsupportedInput, status_error
from cotrain.requests.background_loop import BackgroundLoop
from cotrain.requests.chunks import chunks_of
from cotrain.requests.connection import Connection
from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_pass, wait_for_result
from cotrain.requests.run_requests import RunRequests
from cotrain.transport.http import Transport
from cotrain.transport.responses import is_transient, reader
from cotrain.wire.codec import encode_datums, wrap_datums
from cotrain.wire.datums import Datum, ForwardBackwardOutput, total_weight
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams, OptimStepResponse, SweepFuture, SweepFutures

Answer = TypeVar("Answer")
T = TypeVar("T")


class RunStep(NamedTuple):
    """Futures of one run: its pass, and its optimizer step, if any."""

    passed: Future[ForwardBackwardOutput]
    stepped: Future[OptimStepResponse] | None


class _Joint(Generic[Answer]):
    """One POST that several runs send together, once the queue of each of them has reached it.

    All of them get its answer or its error. After a rejection by a full server each of them sends again, together.
    """

    def __init__(self, runs: int, post: Callable[[], Awaitable[Answer]]) -> None:
        self._runs = runs
        self._post = post
        self._begin()

    def _begin(self) -> None:
        self._arrived = 0
        self._all_arrived = asyncio.Event()
        self._attempt = asyncio.create_task(self._once(self._all_arrived))

    async def _once(self, all_arrived: asyncio.Event) -> Answer:
        await all_arrived.wait()
        return await self._post()

    async def send(self) -> Answer:
        """Wait until all runs have called this, and return the answer to the one POST."""
        if self._all_arrived.is_set():
            self._begin()
        attempt = self._attempt
        self._arrived += 1
        if self._arrived == self._runs:
            self._all_arrived.set()
        return await asyncio.shield(attempt)


def send_sweep_pass(
    connection: Connection,
    runs: Sequence[RunRequests],
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
    steps: Sequence[AdamParams] | None = None,
) -> list[RunStep]:
    """POST a pass as the next request of each run; with `steps`, an optimizer step of each run follows.

    Raises UnsupportedInput for a datum that is not text, or for too much data in one call.
    """
    chunks = chunks_of(encode_datums(data), connection.known_config)
    if len(chunks) > 1:
        raise UnsupportedInput("this server trains no sweeps: create the runs one by one")
    batch = wrap_datums("", 0, chunks[0], loss_fn, loss_fn_config, forward_only=forward_only)
    connection.warn_of_unshifted(data)
    weight = total_weight(data) if loss_fn == "cross_entropy" else 0.0
    request = wire.SweepPassRequest(pass_request=batch.SerializeToString(deterministic=True))
    size_bytes = request.ByteSize()
    connection.in_flight.acquire(size_bytes)
    with ExitStack() as ordered:
        for run in sorted(runs, key=lambda run: run.model_id):  # one order for all sweeps, so none deadlock
            ordered.enter_context(run.ordered())
        seq_ids = [run.reserve(2 if steps else 1)[0] for run in runs]
        request.runs.CopyFrom(_positions([run.model_id for run in runs], seq_ids, steps or ()))
        answer = connection.loop.start(_submit(connection, runs, seq_ids, request, size_bytes))
    return [_run_step(connection.loop, run, answer, i, weight, bool(steps)) for i, run in enumerate(runs)]


async def _submit(
    connection: Connection,
    runs: Sequence[RunRequests],
    seq_ids: Sequence[int],
    request: wire.SweepPassRequest,
    size_bytes: int,
) -> list[SweepFuture]:
    joint = _Joint(len(runs), lambda: _post(connection.transport, runs, seq_ids, request))
    try:
        answers = await asyncio.gather(
            *(
                run.queue.send(seq_id, size_bytes // len(runs), joint.send)
                for run, seq_id in zip(runs, seq_ids, strict=True)
            ),
            return_exceptions=True,
        )
    finally:
        connection.in_flight.release(size_bytes)
    first = answers[0]
    if isinstance(first, BaseException):
        raise first
    return first


async def _post(
    transport: Transport, runs: Sequence[RunRequests], seq_ids: Sequence[int], request: wire.SweepPassRequest
) -> list[SweepFuture]:
    try:
        for run in runs:
            await run.fill_lost()
        answer = await transport.post("sweep_pass", request, reader(SweepFutures), raises_busy=True)
    except RateLimitError:
        raise
    except APIError as error:
        for run, first in zip(runs, seq_ids, strict=True):
            for seq_id in range(first, first + 1 + request.runs.HasField("adam")):
                await run.fill(seq_id, is_abandoned=is_transient(error))
        raise
    if [each.model_id for each in answer.runs] != [run.model_id for run in runs]:
        raise MalformedMessage("sweep_pass did not answer for the runs of the request")
    return answer.runs


def _run_step(
    loop: BackgroundLoop,
    run: RunRequests,
    answer: concurrent.futures.Future[list[SweepFuture]],
    number: int,
    weight: float,
    has_step: bool,
) -> RunStep:
    """Return the futures of the run at position `number`; `weight` is the sum of the weights of the batch."""

    async def wait(transport: Transport, request_id: str) -> ForwardBackwardOutput:
        return (await wait_for_pass(transport, request_id)).with_total_weight(weight)

    def accepted(position: int) -> concurrent.futures.Future[str]:
        return loop.start(_request_id(answer, number, position))

    passed = run.result_of(accepted(0), wait, "a pass")
    if not has_step:
        return RunStep(passed, None)
    wait_for_step = partial(wait_for_result, result=OptimStepResponse)
    return RunStep(passed, run.result_of(accepted(1), wait_for_step, "an optim_step"))


def _positions(model_ids: Sequence[str], seq_ids: Sequence[int], steps: Sequence[AdamParams]) -> wire.SweepRuns:
    """Return the message of a request's runs, in short: the common prefix of the ids once, and equal values as one."""
    prefix = commonprefix(model_ids)  # noqa: RUF071  # of any characters; they are no paths
    adam = None
    if steps:
        columns = {field: _column([getattr(step, field) for step in steps]) for field in AdamParams.model_fields}
        is_default = {name: columns[name] == [info.default] for name, info in AdamParams.model_fields.items()}
        adam = wire.AdamSteps(**{name: each for name, each in columns.items() if not is_default[name]})
    return wire.SweepRuns(
        prefix=prefix,
        names=",".join(each.removeprefix(prefix) for each in model_ids),
        seq_ids=_column(seq_ids),
        adam=adam,
    )


def _column(values: Sequence[T]) -> list[T]:
    """Return one value if all are equal, otherwise all of them."""
    return list(values[:1] if len(set(values)) == 1 else values)


async def _request_id(answer: concurrent.futures.Future[list[SweepFuture]], number: int, position: int) -> str:
    """Return a request id of one run. Raises APIStatusError if the run accepted nothing."""
    # Shielded, so that a caller that cancels one result leaves no gap in the order of the runs.
    entry = (await asyncio.shield(asyncio.wrap_future(answer)))[number]
    if entry.error is not None:
        raise status_error(entry.status_code, entry.error, None)
    return entry.request_ids[position]
