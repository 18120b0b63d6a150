"""The ordered requests of one run: each takes its place when it is made, whatever becomes of it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from cotrain.chunks import combine, cut
from cotrain.codec import encode_datums, wrap_datums
from cotrain.errors import APIError, APIStatusError
from cotrain.futures import Future
from cotrain.polling import wait_for_json, wait_for_pass
from cotrain.transport import is_transient, read
from cotrain.types import UntypedAPIFuture

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message
    from pydantic import BaseModel

    from cotrain.connection import Connection
    from cotrain.types import Datum, ForwardBackwardOutput, SequencedRequest

T = TypeVar("T")
Result = TypeVar("Result", bound="BaseModel")


class RunTraffic:
    """Numbers a run's requests and sends them."""

    def __init__(self, connection: Connection, model_id: str) -> None:
        self._loop = connection.loop
        self._transport = connection.transport
        self._model_id = model_id
        self._ordering = threading.Lock()
        self._next_seq_id = 1

    def ask(
        self, path: str, request: type[SequencedRequest], answer: type[Result], /, **what: Any
    ) -> Future[Result]:
        """POST a request of these fields in its turn; its result is JSON.

        Raises ValidationError for what cannot be sent.
        """
        # Read before a place in the order is taken, so that what cannot be sent leaves no gap.
        read_request = request(model_id=self._model_id, seq_id=1, **what)
        numbered = read_request.model_copy(update={"seq_id": self._reserve(1)[0]})
        accepted = self._loop.start(self._submit(path, [numbered]))
        return Future(accepted, self._loop.start(self._json_result(accepted, answer)))

    def pass_over(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        """POST a forward or forward_backward in its turn, in as many requests as its size needs.

        Raises UnsupportedInput for a datum that is not text.
        """
        # Encoded here, so that what the caller changes afterwards changes nothing, and before a
        # place in the order is taken, so that a datum that cannot be encoded leaves no gap.
        chunks = cut(encode_datums(data))
        requests = [
            wrap_datums(
                self._model_id, seq_id, chunk, loss_fn, loss_fn_config, forward_only=forward_only
            )
            for seq_id, chunk in zip(self._reserve(len(chunks)), chunks, strict=True)
        ]
        accepted = self._loop.start(self._submit("forward_backward", requests))
        return Future(accepted, self._loop.start(self._pass_result(accepted)))

    def _reserve(self, count: int) -> range:
        """Take the next places in the run's order."""
        with self._ordering:
            first = self._next_seq_id
            self._next_seq_id += count
        return range(first, first + count)

    async def _submit(self, path: str, requests: Sequence[BaseModel | Message]) -> list[str]:
        """POST every request at once (the server orders them); returns their request ids."""
        answers = await asyncio.gather(
            *(self._submit_one(path, request) for request in requests), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, str)]

    async def _submit_one(self, path: str, request: Any) -> str:
        try:
            response = await self._transport.post(path, request)
        except APIStatusError as error:
            if not is_transient(error):
                await self._fill_gap(request.seq_id)
            raise
        return read(response, UntypedAPIFuture).request_id

    async def _fill_gap(self, seq_id: int) -> None:
        """Give the place of a refused request to one that does nothing.

        Otherwise the server would wait for this place in the order and every later request with it.
        """
        nothing = wrap_datums(self._model_id, seq_id, [], "cross_entropy", None, forward_only=True)
        with suppress(APIError):
            await self._transport.post("forward_backward", nothing)

    async def _pass_result(
        self, accepted: concurrent.futures.Future[list[str]]
    ) -> ForwardBackwardOutput:
        request_ids = await _undisturbed(accepted)
        outputs = await asyncio.gather(
            *(wait_for_pass(self._transport, request_id) for request_id in request_ids)
        )
        return combine(outputs)

    async def _json_result(
        self, accepted: concurrent.futures.Future[list[str]], model: type[Result]
    ) -> Result:
        (request_id,) = await _undisturbed(accepted)
        return model.model_validate(await wait_for_json(self._transport, request_id))


async def _undisturbed(accepted: concurrent.futures.Future[T]) -> T:
    """Await acceptance so that whoever gives up the result does not leave a gap in the order."""
    return await asyncio.shield(asyncio.wrap_future(accepted))
