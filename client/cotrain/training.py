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
from cotrain.tokenizer import load_tokenizer
from cotrain.transport import is_transient, read
from cotrain.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    UnloadModelRequest,
    UntypedAPIFuture,
)

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message
    from pydantic import BaseModel

    from cotrain.connection import Connection
    from cotrain.samplers import Samplers
    from cotrain.sampling import SamplingClient
    from cotrain.types import Datum


T = TypeVar("T")
Result = TypeVar("Result", bound="BaseModel")


class TrainingClient:
    """Trains one adapter. Every call takes its place in the run's order before it returns.

    So `forward_backward` and `optim_step` may be sent together and waited for afterwards; sent
    together, they share a clock cycle. An `_async` method returns, when awaited, the same future
    once the server has the request; await that for the result.
    """

    def __init__(
        self, connection: Connection, samplers: Samplers, model_id: str, base_model: str
    ) -> None:
        self._loop = connection.loop
        self._transport = connection.transport
        self._samplers = samplers
        self._model_id = model_id
        self._base_model = base_model
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
        return self._step("optim_step", request, OptimStepResponse)

    async def optim_step_async(
        self, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Send an `optim_step`; returns once the server has it."""
        return await _accepted(self.optim_step(adam_params))

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Keep the weights as they are at this place in the order, for sampling; gives their path.

        A name that was used before moves to these weights; samplers made of it keep theirs.
        """
        return self._save(path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata)

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Send a `save_weights_for_sampler`; returns once the server has it."""
        return await _accepted(self.save_weights_for_sampler(name, ttl_seconds, user_metadata))

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Keep the weights as they are at this place in the order, and sample from them.

        With a name they can be found again; without one they last as long as they are used.
        Blocks until they are kept; what was sent before goes on meanwhile.
        """
        return self._loop.run(self._sampler_of(self._save_for(name)))

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None
    ) -> SamplingClient:
        """Sample from the weights of now; see `save_weights_and_get_sampling_client`."""
        return await self._loop.run_async(self._sampler_of(self._save_for(name)))

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Sample from weights that were saved, of whichever run."""
        return self._loop.run(self._samplers.create(model_path=model_path))

    async def create_sampling_client_async(self, model_path: str) -> SamplingClient:
        """Sample from weights that were saved, of whichever run."""
        return await self._loop.run_async(self._samplers.create(model_path=model_path))

    def get_tokenizer(self) -> Any:
        """Load the base model's tokenizer; needs transformers. Raises TokenizerMissing."""
        return load_tokenizer(self._base_model, self.get_info().model_data.tokenizer_id)

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

    def _save_for(self, name: str | None) -> Future[SaveWeightsForSamplerResponse]:
        if name is not None:
            return self._save(path=name)
        return self._save(sampling_session_seq_id=self._samplers.reserve())

    def _save(self, **what: Any) -> Future[SaveWeightsForSamplerResponse]:
        # Read before a place in the order is taken, so that what cannot be sent leaves no gap.
        request = SaveWeightsForSamplerRequest(model_id=self._model_id, seq_id=1, **what)
        request = request.model_copy(update={"seq_id": self._reserve(1)[0]})
        return self._step("save_weights_for_sampler", request, SaveWeightsForSamplerResponse)

    def _step(self, path: str, request: BaseModel, model: type[Result]) -> Future[Result]:
        accepted = self._loop.start(self._submit(path, [request]))
        return Future(accepted, self._loop.start(self._json_result(accepted, model)))

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

    async def _sampler_of(self, saved: Future[SaveWeightsForSamplerResponse]) -> SamplingClient:
        answer = await saved
        if answer.sampling_session_id is not None:
            return await self._samplers.client(answer.sampling_session_id, self._base_model)
        return await self._samplers.create(model_path=answer.path)

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


async def _undisturbed(accepted: concurrent.futures.Future[T]) -> T:
    """Await acceptance so that whoever gives up the result does not leave a gap in the order."""
    return await asyncio.shield(asyncio.wrap_future(accepted))
