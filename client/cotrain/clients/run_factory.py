"""Factory of the runs of one session: new runs, and runs that continue from a checkpoint."""

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from cotrain.clients.sampling import Samplers
from cotrain.clients.session import Session
from cotrain.clients.sweep import Sweep, Trial, read_settings, shown_settings
from cotrain.clients.training import TrainingClient
from cotrain.errors import MalformedMessage, UnsupportedInput, status_error
from cotrain.requests.connection import Connection
from cotrain.requests.polling import wait_for_json
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import CreateFromWeightsRequest, OptimizerChoice
from cotrain.wire.model import WireModel
from cotrain.wire.runs import (
    AdamParams,
    CreateModelRequest,
    ForkRunRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    OptimizerConfig,
    SweepFutures,
    UntypedAPIFuture,
)


class Made(WireModel):
    """Result of a request that creates a run."""

    model_id: str


@dataclass(frozen=True)
class Start:
    """Checkpoint that a run starts from."""

    path: str
    base_model: str | None
    """Base model of the checkpoint, or None."""
    user_metadata: dict[str, Any] | None
    """Metadata of the new run."""
    weights_access_token: str | None = field(repr=False)
    """API key of the tenant that owns the checkpoint, if that is another tenant."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of the new run."""


@dataclass(frozen=True)
class Labels:
    """Note and tags of a run, used by lists and searches."""

    note: str | None = None
    tags: list[str] | None = None


class Runs:
    """Factory of the runs of a session; numbers them in the order of the calls."""

    def __init__(self, connection: Connection, session: Session, samplers: Samplers) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._session = session
        self._samplers = samplers
        self._seq_ids = itertools.count()

    async def reserve(self) -> tuple[str, int]:
        """Return the `session_id` and the next `model_seq_id`."""
        await self._connection.config()  # first, because it checks that this is a compatible server
        return await self._session.id(), next(self._seq_ids)

    async def create(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, Any] | None,
        labels: Labels,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Create a run with a new adapter. Raises RequestFailed, APIError, or UnsupportedInput."""
        if not isinstance(optimizer, OptimizerConfig | None):
            raise UnsupportedInput(
                f"optimizer must be types.AdamOptimizerConfig() or types.MuonOptimizerConfig(), not {optimizer!r:.80}"
            )
        session_id, seq_id = await self.reserve()
        request = CreateModelRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
            optimizer_config=optimizer or OptimizerConfig(),
            note=labels.note,
            tags=labels.tags,
        )
        return self._client(await self._made("create_model", request), base_model)

    async def load(self, start: Start, *, optimizer: bool) -> TrainingClient:
        """Create a run with the state of a checkpoint. Raises RequestFailed or APIError."""
        session_id, seq_id = await self.reserve()
        request = CreateFromWeightsRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            path=start.path,
            optimizer=optimizer,
            base_model=start.base_model,
            user_metadata=start.user_metadata,
            weights_access_token=start.weights_access_token,
            optimizer_config=start.optimizer and OptimizerChoice(type=start.optimizer.type),
        )
        model_id = await self._made("load_weights", request)
        found = await self._transport.post("get_info", GetInfoRequest(model_id=model_id), reader(GetInfoResponse))
        base_model = found.model_data.model_name
        if base_model is None:
            raise MalformedMessage("get_info did not name a base model")
        return self._client(model_id, base_model)

    async def sweep(
        self, base_model: str, settings: Sequence[Mapping[str, Any]], name: str | None, labels: Labels
    ) -> Sweep[TrainingClient]:
        """Create the runs of a sweep together. If one cannot be created, end the others and raise its error."""
        read, name = read_settings(settings), name or secrets.token_hex(4)
        shown = [shown_settings(given, adam) for given, (_, adam) in zip(settings, read, strict=True)]
        tagged = Labels(labels.note, [f"sweep:{name}", *(labels.tags or ())])
        made = await asyncio.gather(
            *(
                self.create(base_model, lora, {"sweep": name, "trial": number, **given}, tagged)
                for number, (given, (lora, _)) in enumerate(zip(shown, read, strict=True))
            ),
            return_exceptions=True,
        )
        runs = [each for each in made if isinstance(each, TrainingClient)]
        failed = next((each for each in made if isinstance(each, BaseException)), None)
        if failed:
            await asyncio.gather(*(run.unload_async() for run in runs), return_exceptions=True)
            raise failed
        trials = [Trial(number, shown[number], run, read[number][1]) for number, run in enumerate(runs)]
        return Sweep(self._connection, name, trials)

    async def fork(
        self, sampler_id: str, parent: str, base_model: str, adams: Sequence[AdamParams], name: str | None
    ) -> Sweep[TrainingClient]:
        """Create a run for each optimizer, from an unnamed save of `parent` with the optimizer state.

        Raises RequestFailed or APIError.
        """
        name = name or secrets.token_hex(4)
        settings = [{"lr": adam.learning_rate} for adam in adams]
        request = ForkRunRequest(
            session_id=await self._session.id(),
            sampling_session_id=sampler_id,
            model_seq_ids=[next(self._seq_ids) for _ in adams],
            user_metadata=[
                {"sweep": name, "trial": number, "forked_from": parent, **each} for number, each in enumerate(settings)
            ],
            tags=[f"sweep:{name}"],
        )
        answer = await self._transport.post("fork_run", request, reader(SweepFutures))
        for refused in answer.runs:
            if refused.error is not None:
                raise status_error(refused.status_code, refused.error, None)
        made = (wait_for_json(self._transport, each.request_ids[0], Made) for each in answer.runs)
        runs = [self._client(each.model_id, base_model) for each in await asyncio.gather(*made)]
        trials = [Trial(number, settings[number], run, adams[number]) for number, run in enumerate(runs)]
        return Sweep(self._connection, name, trials)

    async def _made(self, endpoint: str, request: BaseModel) -> str:
        future = await self._transport.post(endpoint, request, reader(UntypedAPIFuture))
        return (await wait_for_json(self._transport, future.request_id, Made)).model_id

    def _client(self, model_id: str, base_model: str) -> TrainingClient:
        return TrainingClient(self._connection, self._samplers, model_id, base_model, self)
