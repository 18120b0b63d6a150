"""TrainingClient: one run, whose requests the server executes in the order of these calls."""

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
from cotrain.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UntypedAPIFuture,
)

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message
    from pydantic import BaseModel

    from cotrain.background import BackgroundLoop
    from cotrain.transport import Transport
    from cotrain.types import Datum


T = TypeVar("T")


class TrainingClient:
    """Trains one adapter. Every call takes its place in the run's order before it returns.

    So `forward_backward` and `optim_step` may be sent together and waited for afterwards; sent
    together, they share a clock cycle. An `_async` method returns, when awaited, the same future
    once the server has the request; await that for the result.
    """

    def __init__(self, loop: BackgroundLoop, transport: Transport, model_id: str) -> None:
        self._loop = loop
        self._transport = transport
        self._model_id = model_id
        self._ordering = threading.Lock()
        self._next_seq_id = 1

    @property
    def model_id(self) -> str:
        """The run's id on the server."""
        return self._model_id

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Compute log-probs and the loss; leaves gradients as they are."""
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Send a `forward`; returns once the server has it."""
        return await _accepted(self.forward(data, loss_fn, loss_fn_config))

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to what the run has accumulated.

        Losses are sums over tokens and datums, so splitting a batch over calls changes nothing.
        Raises UnsupportedInput for a datum that is not text.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Send a `forward_backward`; returns once the server has it."""
        return await _accepted(self.forward_backward(data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams | None = None) -> Future[OptimStepResponse]:
        """Take one AdamW step with the accumulated gradient, then zero the gradient."""
        request = OptimStepRequest(
            model_id=self._model_id,
            seq_id=self._reserve(1)[0],
            adam_params=adam_params or AdamParams(),
        )
        accepted = self._loop.start(self._submit("optim_step", [request]))
        return Future(accepted, self._loop.start(self._optim_result(accepted)))

    async def optim_step_async(
        self, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Send an `optim_step`; returns once the server has it."""
        return await _accepted(self.optim_step(adam_params))

    def get_info(self) -> GetInfoResponse:
        """Ask what this run is."""
        return self._loop.run(self._info())

    async def get_info_async(self) -> GetInfoResponse:
        """Ask what this run is."""
        return await self._loop.run_async(self._info())

    def unload(self) -> None:
        """End the run and free its place on the server; requests still waiting fail."""
        self._loop.run(self._unload())

    async def unload_async(self) -> None:
        """End the run and free its place on the server; requests still waiting fail."""
        await self._loop.run_async(self._unload())

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
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
        request_ids = await asyncio.wrap_future(accepted)
        outputs = await asyncio.gather(
            *(wait_for_pass(self._transport, request_id) for request_id in request_ids)
        )
        return combine(outputs)

    async def _optim_result(
        self, accepted: concurrent.futures.Future[list[str]]
    ) -> OptimStepResponse:
        (request_id,) = await asyncio.wrap_future(accepted)
        result = await wait_for_json(self._transport, request_id)
        return OptimStepResponse.model_validate(result)

    async def _info(self) -> GetInfoResponse:
        request = GetInfoRequest(model_id=self._model_id)
        return read(await self._transport.post("get_info", request), GetInfoResponse)

    async def _unload(self) -> None:
        request = UnloadModelRequest(model_id=self._model_id)
        future = read(await self._transport.post("unload_model", request), UntypedAPIFuture)
        await wait_for_json(self._transport, future.request_id)


async def _accepted(future: Future[T]) -> Future[T]:
    await future.accepted_async()
    return future
