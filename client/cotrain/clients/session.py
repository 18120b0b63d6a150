"""Session of one client, and the factories of its samplers and runs."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from typing_extensions import override

from cotrain.clients.sampling import SamplingClient
from cotrain.clients.sweep import Sweep, Trial, read_settings, shown_settings
from cotrain.clients.training import TrainingClient
from cotrain.errors import APIError, APIStatusError, MalformedMessage, UnsupportedInput, status_error
from cotrain.requests.connection import Connection, wait_for_result
from cotrain.transport.http import Transport
from cotrain.transport.responses import acknowledged, reader
from cotrain.version import __version__
from cotrain.wire.checkpoints import CreateFromWeightsRequest, OptimizerChoice
from cotrain.wire.rest import FinishReason, FinishReasonType
from cotrain.wire.runs import (
    AdamParams,
    CreateModelRequest,
    ForkRunRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    NewRun,
    OptimizerConfig,
    SweepFutures,
    UntypedAPIFuture,
)
from cotrain.wire.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse, GetSamplerResponse
from cotrain.wire.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)

log = logging.getLogger("cotrain")

HEARTBEAT_EVERY_S = 10.0
# A server ends a session after two minutes without a heartbeat; warn at that time.
WARN_AFTER_MISSED = 12

# Maximum time to report the end of the session, so that closing a client does not hang with the server.
FAREWELL_S = 5.0


class Session:
    """Session on one server: opened on first use, kept active by heartbeats, finished once.

    Its methods run on the client's own loop.
    """

    def __init__(
        self,
        transport: Transport,
        user_metadata: dict[str, Any] | None,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        self._transport = transport
        self._create_request = CreateSessionRequest(
            sdk_version=f"cotrain-{__version__}",
            user_metadata=user_metadata or {},
            project_id=project_id,
            display_name=display_name,
        )
        self._opening = asyncio.Lock()
        self._id: str | None = None
        self.heartbeat: asyncio.Task[None] | None = None
        """Sends heartbeats while the session is open."""

    @override
    def __repr__(self) -> str:
        return f"session {self._id}" if self._id else "no session yet"

    async def id(self) -> str:
        """Return the session's id; the first call opens the session."""
        async with self._opening:
            if self._id is None:
                opened = await self._transport.post(
                    "create_session", self._create_request, reader(CreateSessionResponse)
                )
                self._id = opened.session_id
                self.heartbeat = asyncio.create_task(self._send_heartbeats(self._id))
        return self._id

    async def finish(self, outcome: FinishReasonType, detail: str | None = None) -> None:
        """Report the end of the session. If the report is lost, the server ends it when heartbeats stop."""
        if self.heartbeat is not None:
            self.heartbeat.cancel()
        if self._id is None:
            return
        farewell = FinishSessionRequest(reason=FinishReason(type=outcome), detail=detail)
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._transport.post_once(f"sessions/{self._id}/finish", farewell, acknowledged)

    async def _send_heartbeats(self, session_id: str) -> None:
        missed = 0
        while True:
            await self._transport.sleep(HEARTBEAT_EVERY_S)
            try:
                await self._transport.post_once(
                    "session_heartbeat",
                    SessionHeartbeatRequest(session_id=session_id),
                    reader(SessionHeartbeatResponse),
                )
                missed = 0
            except APIError as error:
                missed += 1
                if _is_final(error):
                    log.warning("the server has ended session %s: %s", session_id, error)
                    return
                if missed == WARN_AFTER_MISSED:
                    log.warning("%d heartbeats of session %s missed: %s", missed, session_id, error)


def _is_final(error: APIError) -> bool:
    # The server rejects with JSON; a proxy's page implies nothing about the session.
    return (
        isinstance(error, APIStatusError) and error.status_code in (401, 403, 404, 410) and isinstance(error.body, dict)
    )


class ClientFactory:
    """Factory of the runs and samplers of a session; numbers each kind in the order of the calls."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._session = session
        self._run_numbers = itertools.count()
        self._sampler_numbers = itertools.count()

    async def reserve_run(self) -> tuple[str, int]:
        """Return the `session_id` and the next `model_seq_id`."""
        await self._connection.config()  # first, because it checks that this is a compatible server
        return await self._session.id(), next(self._run_numbers)

    async def create_run(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, Any] | None,
        note: str | None,
        tags: list[str] | None,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Create a run with a new adapter. Raises RequestFailed, APIError, or UnsupportedInput."""
        if not isinstance(optimizer, OptimizerConfig | None):
            raise UnsupportedInput(
                f"optimizer must be types.AdamOptimizerConfig() or types.MuonOptimizerConfig(), not {optimizer!r:.80}"
            )
        session_id, seq_id = await self.reserve_run()
        request = CreateModelRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
            optimizer_config=optimizer or OptimizerConfig(),
            note=note,
            tags=tags,
        )
        return self._client(await self._made("create_model", request), base_model)

    async def load_run(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, Any] | None,
        weights_access_token: str | None,
        *,
        optimizer: bool,
        optimizer_config: OptimizerChoice | None = None,
    ) -> TrainingClient:
        """Create a run with the state of a checkpoint. Raises RequestFailed or APIError."""
        session_id, seq_id = await self.reserve_run()
        request = CreateFromWeightsRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            path=path,
            optimizer=optimizer,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
            optimizer_config=optimizer_config,
        )
        model_id = await self._made("load_weights", request)
        found = await self._transport.post("get_info", GetInfoRequest(model_id=model_id), reader(GetInfoResponse))
        if found.model_data.model_name is None:
            raise MalformedMessage("get_info did not name a base model")
        return self._client(model_id, found.model_data.model_name)

    async def create_sweep(
        self,
        base_model: str,
        settings: Sequence[Mapping[str, Any]],
        name: str | None,
        note: str | None,
        tags: Sequence[str],
    ) -> Sweep[TrainingClient]:
        """Create the runs of a sweep together. If one cannot be created, end the others and raise its error."""
        read, name = read_settings(settings), name or secrets.token_hex(4)
        shown = [shown_settings(given, adam) for given, (_, adam) in zip(settings, read, strict=True)]
        made = await asyncio.gather(
            *(
                self.create_run(
                    base_model, lora, {"sweep": name, "trial": number, **given}, note, [f"sweep:{name}", *tags]
                )
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
            model_seq_ids=[next(self._run_numbers) for _ in adams],
            user_metadata=[
                {"sweep": name, "trial": number, "forked_from": parent, **each} for number, each in enumerate(settings)
            ],
            tags=[f"sweep:{name}"],
        )
        answer = await self._transport.post("fork_run", request, reader(SweepFutures))
        for refused in answer.runs:
            if refused.error is not None:
                raise status_error(refused.status_code, refused.error, None)
        made = (wait_for_result(self._transport, each.request_ids[0], NewRun) for each in answer.runs)
        runs = [self._client(each.model_id, base_model) for each in await asyncio.gather(*made)]
        trials = [Trial(number, settings[number], run, adams[number]) for number, run in enumerate(runs)]
        return Sweep(self._connection, name, trials)

    def reserve_sampler(self) -> int:
        """Return the next `sampling_session_seq_id`."""
        return next(self._sampler_numbers)

    async def create_sampler(self, *, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Create a sampler of saved weights, or of a base model. Raises APIError."""
        request = CreateSamplingSessionRequest(
            session_id=await self._session.id(),
            sampling_session_seq_id=self.reserve_sampler(),
            base_model=base_model,
            model_path=model_path,
        )
        made = await self._transport.post("create_sampling_session", request, reader(CreateSamplingSessionResponse))
        sampler_id = made.sampling_session_id
        if model_path is not None or base_model is None:
            found = await self._transport.get(f"samplers/{quote(sampler_id)}", reader(GetSamplerResponse))
            base_model = found.base_model
        return await self.sampler(sampler_id, base_model)

    async def sampler(self, sampler_id: str, base_model: str) -> SamplingClient:
        """Return the client of an existing sampler."""
        config = await self._connection.config()
        return SamplingClient(
            self._connection, sampler_id, base_model, polls_in_batches=config.sample_use_retrieve_futures
        )

    async def _made(self, endpoint: str, request: BaseModel) -> str:
        future = await self._transport.post(endpoint, request, reader(UntypedAPIFuture))
        return (await wait_for_result(self._transport, future.request_id, NewRun)).model_id

    def _client(self, model_id: str, base_model: str) -> TrainingClient:
        return TrainingClient(self._connection, self, model_id, base_model)
