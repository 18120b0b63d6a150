"""Makes the sampling clients of one session."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from urllib.parse import quote

from cotrain.clients.sampling import SamplingClient
from cotrain.transport.http import reader
from cotrain.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
)

if TYPE_CHECKING:
    from cotrain.clients.session import Session
    from cotrain.requests.connection import Connection


class Samplers:
    """Makes the samplers of a session, and numbers them in the order they are asked for."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._session = session
        self._seq_ids = itertools.count()

    def reserve(self) -> int:
        """Take the next `sampling_session_seq_id`."""
        return next(self._seq_ids)

    async def create(
        self, *, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Make a sampler of saved weights, or of a base model. Raises APIError."""
        request = CreateSamplingSessionRequest(
            session_id=await self._session.id(),
            sampling_session_seq_id=self.reserve(),
            base_model=base_model,
            model_path=model_path,
        )
        made = await self._connection.transport.post(
            "create_sampling_session", request, reader(CreateSamplingSessionResponse)
        )
        sampler_id = made.sampling_session_id
        if model_path is not None or base_model is None:
            base_model = await self._base_model_of(sampler_id)
        return await self.client(sampler_id, base_model)

    async def client(self, sampler_id: str, base_model: str) -> SamplingClient:
        """Make the client of a sampler that exists."""
        config = await self._connection.config()
        return SamplingClient(
            self._connection,
            sampler_id,
            base_model,
            polls_in_batches=config.sample_use_retrieve_futures,
        )

    async def _base_model_of(self, sampler_id: str) -> str:
        path = f"samplers/{quote(sampler_id)}"
        found = await self._connection.transport.get(path, reader(GetSamplerResponse))
        return found.base_model
