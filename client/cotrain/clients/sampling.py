"""SamplingClient: continues and scores prompts with weights that never change."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

from typing_extensions import override

from cotrain.clients.tokenizer import load_tokenizer
from cotrain.clients.unsupported_arguments import Ready, accepts_hosted
from cotrain.errors import APIError, APIStatusError, MalformedMessage, RateLimitError, UnsupportedInput
from cotrain.requests.connection import Connection, shared_connection
from cotrain.requests.futures import Future, submitted
from cotrain.requests.polling import GAP_S, wait_for_result
from cotrain.settings import ClientSettings, client_settings
from cotrain.transport.http import Transport
from cotrain.transport.responses import acknowledged, reader
from cotrain.wire.codec import decode_sample_response
from cotrain.wire.datums import ModelInput
from cotrain.wire.model import WireModel
from cotrain.wire.runs import UntypedAPIFuture
from cotrain.wire.sampling import (
    CLONE_SEQ_IDS,
    MAX_RETRIEVED,
    CancelFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SamplingSessionTarget,
)
from cotrain.wire.tensors import TensorData

T = TypeVar("T")

log = logging.getLogger("cotrain")

EXPIRED = 410  # Gone
CANCEL_WITHIN_S = 5.0
ATTEMPTS = 5
"""Maximum number of requests for one sample whose result expires on the server before it is read."""


class SamplingClient(Ready):
    """Client of one sampler: saved weights, or a base model, as they were when it was created.

    It works from any thread or event loop. It can be pickled to sample from other processes; the pickle
    contains the API key.
    """

    def __init__(
        self, connection: Connection, sampler_id: str, base_model: str, *, polls_in_batches: bool, clone: int = 0
    ) -> None:
        self._connection = connection
        self._sampler_id = sampler_id
        self._base_model = base_model
        self._polls_in_batches = polls_in_batches
        target = SamplingSessionTarget(sampling_session_id=sampler_id, cloned_sampler_id=clone)
        self._completions = Completions(connection.transport, target)
        self._seq_ids = itertools.count(clone * CLONE_SEQ_IDS)

    @property
    def sampler_id(self) -> str:
        """Id of the sampler on the server."""
        return self._sampler_id

    @override
    def __repr__(self) -> str:
        at = f"{self._base_model} at {self._connection!r}"
        return f"<SamplingClient of sampler {self._sampler_id}, {at}>"

    @accepts_hosted("prompt_alt_tokens_k")
    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        *,
        prompt_logprobs_last_n: int | None = None,
        return_routed_experts: bool = False,
    ) -> Future[SampleResponse]:
        """Sample `num_samples` continuations of a prompt.

        If the server is busy, the request is retried without a time limit. Cancelling the only task that awaits the
        future cancels the sample on the server. Other tokens are scored at the prompt positions of
        `target_prompt_logprobs` (int64 `[len(prompt) - 1, K]`); -1 means none. `return_routed_experts` returns
        the experts of each token of a mixture, for `Datum(routed_experts=...)`.
        """
        request = SampleRequest(
            sampling_session_id=self._sampler_id,
            seq_id=next(self._seq_ids),
            num_samples=num_samples,
            prompt=_copied(prompt),
            sampling_params=sampling_params or SamplingParams(),
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            return_routed_experts=return_routed_experts,
        )
        return self._start(request, lambda response: response)

    sample_async = submitted(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Future[list[float | None]]:
        """Compute the log-probs of all prompt tokens, or of the last N; None for the others.

        The first token has no log-prob, because no token precedes it.
        """
        request = SampleRequest(
            sampling_session_id=self._sampler_id,
            seq_id=next(self._seq_ids),
            prompt=_copied(prompt),
            sampling_params=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return self._start(request, _prompt_logprobs)

    compute_logprobs_async = submitted(compute_logprobs)

    def get_base_model(self) -> str:
        """Return the name of the base model, without a call of the server."""
        return self._base_model

    async def get_base_model_async(self) -> str:
        """Return the name of the base model, without a call of the server."""
        return self._base_model

    def get_tokenizer(self) -> Any:
        """Load the base model's tokenizer; needs transformers. Raises TokenizerMissing."""
        return load_tokenizer(self._connection, self._base_model)

    def get_sampler_handle(self) -> str:
        """Return a handle of this sampler for other processes; unlike a pickle it contains no key."""
        handle = SamplerHandle(
            base_url=self._connection.settings.base_url,
            sampler_id=self._sampler_id,
            base_model=self._base_model,
            polls_in_batches=self._polls_in_batches,
        )
        return handle.text()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Create a client for the sampler of a handle; `api_key` defaults to `COTRAIN_API_KEY`.

        Raises ValueError for a malformed handle, or SettingsMissing.
        """
        read = SamplerHandle.of(handle)
        settings = client_settings(read.base_url, api_key)
        return _clone(settings, read.sampler_id, read.base_model, read.polls_in_batches)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _clone, (self._connection.settings, self._sampler_id, self._base_model, self._polls_in_batches)

    def _start(self, request: SampleRequest, read_result: Callable[[SampleResponse], T]) -> Future[T]:
        loop = self._connection.loop
        accepted = loop.start(self._accept(request))
        return Future(
            accepted,
            loop.start(self._result(request, accepted, read_result)),
            what=f"sample {request.seq_id} of sampler {self._sampler_id}",
            ends_with_its_waits=True,
        )

    async def _result(
        self,
        request: SampleRequest,
        accepted: concurrent.futures.Future[UntypedAPIFuture],
        read_result: Callable[[SampleResponse], T],
    ) -> T:
        try:
            future = await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            if not accepted.cancelled() and accepted.exception() is None:
                # Accepted at the moment of the cancellation.
                await self._cancel(accepted.result().request_id)
            raise
        for _ in range(ATTEMPTS - 1):
            try:
                return read_result(await self._retrieve(future))
            except APIStatusError as error:
                if error.status_code != EXPIRED:
                    raise
                log.warning("sample result expired; retrying: %s", error)
            request = request.model_copy(update={"seq_id": next(self._seq_ids)})
            future = await self._accept(request)
        return read_result(await self._retrieve(future))

    async def _accept(self, request: SampleRequest) -> UntypedAPIFuture:
        """POST a sample request until the server accepts it, without a time limit while it is busy.

        Every attempt has the same `seq_id`, so repeats have no effect. Raises APIError.
        """
        async with self._connection.sample_posts:
            while True:
                try:
                    return await self._connection.transport.post("asample", request, reader(UntypedAPIFuture))
                except RateLimitError:
                    continue  # the transport has already reported it

    async def _cancel(self, request_id: str) -> None:
        """Cancel a sample. If the call does not reach the server, the sample still runs."""
        request = CancelFutureRequest(request_id=request_id)
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await self._connection.transport.post_once("cancel_future", request, acknowledged)

    async def _retrieve(self, future: UntypedAPIFuture) -> SampleResponse:
        try:
            if self._polls_in_batches:
                await self._completions.wait_until_ended(future.request_id)
            async with self._connection.sample_polls:
                transport = self._connection.transport
                response = await wait_for_result(transport, future.request_id, SampleResponse, decode_sample_response)
        except asyncio.CancelledError:
            await self._cancel(future.request_id)
            raise
        if self._polls_in_batches:
            self._completions.acknowledge(future.request_id)
        return _with_sequence_ids(response, future.sample_sequence_ids)


def _clone(settings: ClientSettings, sampler_id: str, base_model: str, polls_in_batches: bool) -> SamplingClient:
    """Return a new client of an existing sampler. Its sequence ids differ from those of other clients."""
    connection = shared_connection(settings)
    return SamplingClient(
        connection,
        sampler_id,
        base_model,
        polls_in_batches=polls_in_batches,
        clone=1 + secrets.randbelow(CLONE_SEQ_IDS),
    )


def _with_sequence_ids(response: SampleResponse, ids: list[str] | None) -> SampleResponse:
    """Set the sequence ids that the server assigned when it accepted the request."""
    if ids is None:
        return response
    named = [
        sequence.model_copy(update={"sequence_id": sequence_id})
        for sequence, sequence_id in zip(response.sequences, ids, strict=True)
    ]
    return response.model_copy(update={"sequences": named})


def _copied(prompt: Any) -> ModelInput:
    """Copy a prompt, so that later changes by the caller have no effect."""
    if not isinstance(prompt, ModelInput):
        message = "prompt must be a ModelInput, such as ModelInput.from_ints(tokens)"
        several = "; one call per prompt: send all, then wait" if isinstance(prompt, list) else ""
        raise UnsupportedInput(f"{message}, not a {type(prompt).__name__}{several}")
    return prompt.model_copy(deep=True)


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise MalformedMessage("the server left out the log-probs of the prompt")
    return response.prompt_logprobs


class SamplerHandle(WireModel):
    """Identifier of a sampler on a server. It contains no key; using it requires a key of the tenant."""

    base_url: str
    sampler_id: str
    base_model: str
    polls_in_batches: bool

    def text(self) -> str:
        """Return the handle as letters, digits, `-`, `_` and `=`."""
        return urlsafe_b64encode(self.model_dump_json().encode()).decode()

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse a handle. Raises ValueError if `text` is malformed."""
        try:
            return cls.model_validate_json(urlsafe_b64decode(text))
        except ValueError as error:
            message = "this is no handle of a sampler: get_sampler_handle() gives one"
            raise ValueError(message) from error


class Completions:
    """Completed requests of one sampler. Runs on the client's own loop.

    It decides when to fetch a result, and never contains one. If batch polling fails, each request is
    polled separately, and only the server's response to that poll counts.
    """

    def __init__(self, transport: Transport, target: SamplingSessionTarget) -> None:
        self._transport = transport
        self._target = target
        self._waiting: dict[str, asyncio.Event] = {}
        self._ended: set[str] = set()
        """Requests that ended before a caller waited for them."""
        self._retrieved: set[str] = set()
        """Results that have arrived and are not yet acknowledged to the server."""
        self._cursor = 0
        self._failed = False
        self.task: asyncio.Task[None] | None = None
        """Polls while a result is awaited, or has arrived and is not acknowledged."""

    async def wait_until_ended(self, request_id: str) -> None:
        """Wait until a request has ended, or has to be polled separately."""
        if self._failed or request_id in self._ended:
            self._ended.discard(request_id)
            return
        ended = self._waiting[request_id] = asyncio.Event()
        self._start_polling()
        try:
            await ended.wait()
        finally:
            self._waiting.pop(request_id, None)

    def acknowledge(self, request_id: str) -> None:
        """Acknowledge a result with the next poll, so that the server can drop it."""
        if not self._failed:
            self._retrieved.add(request_id)
            self._start_polling()

    def _start_polling(self) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        patience = self._transport.patience()
        try:
            while self._waiting or self._retrieved:
                try:
                    await self._poll_once()
                    patience.renew()
                except APIError as error:
                    await patience.wait_out(error)
        except APIError as error:
            log.warning("batch polling failed; polling each sample on its own from now on: %s", error)
            self._failed = True
            for waiting in self._waiting.values():
                waiting.set()
        finally:
            self.task = None

    async def _poll_once(self) -> None:
        retrieved = sorted(self._retrieved)[:MAX_RETRIEVED]  # the next poll sends the remainder
        request = RetrieveFuturesRequest(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=None if self._waiting else 0.0,
            retrieved_request_ids=retrieved,
        )
        answer = await self._transport.post_once("retrieve_futures", request, reader(RetrieveFuturesResponse))
        self._retrieved.difference_update(retrieved)
        self._cursor = answer.cursor
        for completion in answer.completions:
            if (waiting := self._waiting.pop(completion.request_id, None)) is not None:
                waiting.set()
            else:
                self._ended.add(completion.request_id)
        if self._waiting and not answer.completions:
            await self._transport.sleep(GAP_S)
