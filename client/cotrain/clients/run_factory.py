"""Makes the runs of one session: fresh ones, and ones that go on from a checkpoint."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from cotrain.clients.sampling import Samplers
from cotrain.clients.session import Session
from cotrain.clients.training import TrainingClient
from cotrain.errors import MalformedMessage
from cotrain.requests.connection import Connection
from cotrain.requests.polling import wait_for_json
from cotrain.transport.http import reader
from cotrain.wire.checkpoints import CreateFromWeightsRequest
from cotrain.wire.model import WireModel
from cotrain.wire.runs import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    UntypedAPIFuture,
)


class Made(WireModel):
    """The result of what makes a run."""

    model_id: str


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from."""

    path: str
    base_model: str | None
    """The checkpoint's, or nothing."""
    user_metadata: dict[str, Any] | None
    """Of the run."""
    weights_access_token: str | None = field(repr=False)
    """A key of the tenant that owns the checkpoint, where that is another one."""


@dataclass(frozen=True)
class Labels:
    """What lists and searches find a run by."""

    note: str | None = None
    tags: list[str] | None = None


class Runs:
    """Makes the runs of a session, and numbers them in the order they are asked for."""

    def __init__(self, connection: Connection, session: Session, samplers: Samplers) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._session = session
        self._samplers = samplers
        self._seq_ids = itertools.count()

    async def reserve(self) -> tuple[str, int]:
        """Take the next place for a run: `session_id` and `model_seq_id`."""
        await self._connection.config()  # first: it shows whether this is a server to talk to
        return await self._session.id(), next(self._seq_ids)

    async def create(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, Any] | None,
        labels: Labels,
    ) -> TrainingClient:
        """Start a run with a fresh adapter. Raises RequestFailed or APIError."""
        session_id, seq_id = await self.reserve()
        request = CreateModelRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
            note=labels.note,
            tags=labels.tags,
        )
        return self._client(await self._made("create_model", request), base_model)

    async def load(self, start: Start, *, optimizer: bool) -> TrainingClient:
        """Start a run with what a checkpoint holds. Raises RequestFailed or APIError."""
        session_id, seq_id = await self.reserve()
        request = CreateFromWeightsRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            path=start.path,
            optimizer=optimizer,
            base_model=start.base_model,
            user_metadata=start.user_metadata,
            weights_access_token=start.weights_access_token,
        )
        model_id = await self._made("load_weights", request)
        found = await self._transport.post(
            "get_info", GetInfoRequest(model_id=model_id), reader(GetInfoResponse)
        )
        base_model = found.model_data.model_name
        if base_model is None:
            raise MalformedMessage("get_info did not name a base model")
        return self._client(model_id, base_model)

    async def _made(self, endpoint: str, request: BaseModel) -> str:
        future = await self._transport.post(endpoint, request, reader(UntypedAPIFuture))
        return (await wait_for_json(self._transport, future.request_id, Made)).model_id

    def _client(self, model_id: str, base_model: str) -> TrainingClient:
        return TrainingClient(self._connection, self._samplers, model_id, base_model)
