"""ServiceClient: the door to one server."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, Self

from cotrain.connection import Connection
from cotrain.errors import MalformedMessage
from cotrain.polling import wait_for_json
from cotrain.samplers import Samplers
from cotrain.session import Session
from cotrain.settings import client_settings
from cotrain.training import TrainingClient
from cotrain.transport import read
from cotrain.types import (
    CreateModelRequest,
    GetServerCapabilitiesResponse,
    LoraConfig,
    UntypedAPIFuture,
)

if TYPE_CHECKING:
    import httpx

    from cotrain.sampling import SamplingClient
    from cotrain.session import Outcome


class ServiceClient:
    """Creates training and sampling clients. Use it from any thread or event loop, and close it when done.

    Without `base_url` and `api_key` it takes `COTRAIN_BASE_URL` and `COTRAIN_API_KEY`. `network`
    replaces the network, for tests.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        user_metadata: dict[str, Any] | None = None,
        network: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = Connection(client_settings(base_url, api_key), network=network)
        self._transport = self._connection.transport
        self._loop = self._connection.loop
        self._session = Session(self._transport, user_metadata)
        self._samplers = Samplers(self._connection, self._session)
        self._model_seq_ids = itertools.count()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        *,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
    ) -> TrainingClient:
        """Start a run: a fresh adapter on a base model, 0 where it ends, so that it changes nothing yet.

        Blocks until the server has made it. Raises RequestFailed or APIError.
        """
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        return self._loop.run(self._create_run(base_model, lora, user_metadata))

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        *,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
    ) -> TrainingClient:
        """Start a run; see `create_lora_training_client`."""
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        return await self._loop.run_async(self._create_run(base_model, lora, user_metadata))

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Sample from weights that were saved (`tinker://…`), or from a base model as it is.

        Raises NotFoundError where there are no such weights, or they are not yours.
        """
        return self._loop.run(self._samplers.create(model_path=model_path, base_model=base_model))

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Make a sampling client; see `create_sampling_client`."""
        return await self._loop.run_async(
            self._samplers.create(model_path=model_path, base_model=base_model)
        )

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Ask which base models the server holds."""
        return self._loop.run(self._capabilities())

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """Ask which base models the server holds."""
        return await self._loop.run_async(self._capabilities())

    def close(self, outcome: Outcome = "success") -> None:
        """Finish the session and end the client's thread. Results not fetched yet are lost."""
        self._loop.close(lambda: self._farewell(outcome))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        self.close("success" if error_class is None else "errored")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self.close, "success" if error_class is None else "errored")

    async def _create_run(
        self, base_model: str, lora: LoraConfig, user_metadata: dict[str, Any] | None
    ) -> TrainingClient:
        request = CreateModelRequest(
            session_id=await self._session.id(),
            model_seq_id=next(self._model_seq_ids),
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
        )
        future = read(await self._transport.post("create_model", request), UntypedAPIFuture)
        created = await wait_for_json(self._transport, future.request_id)
        match created.get("model_id"):
            case str() as model_id:
                return TrainingClient(self._connection, self._samplers, model_id, base_model)
        raise MalformedMessage("create_model did not answer a model_id")

    async def _capabilities(self) -> GetServerCapabilitiesResponse:
        response = await self._transport.get("get_server_capabilities")
        return read(response, GetServerCapabilitiesResponse)

    async def _farewell(self, outcome: Outcome) -> None:
        await self._session.finish(outcome)
        await self._transport.close()
