"""The JSON shapes of a session: how a client and a server find out about each other, and stay in touch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cotrain.wire.model import Name, WireModel


class ClientConfigRequest(WireModel):
    """POST client/config and client/dynamic_config: who is asking."""

    sdk_version: str = ""


class ClientConfigResponse(WireModel):
    """How a client should talk to this server; the defaults are those of the hosted SDK."""

    pjwt_auth_enabled: bool = False
    proto_write_fwdbwd: bool = False
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: Annotated[int, Field(ge=1)] = 1024
    fwdbwd_max_chunk_bytes_count: Annotated[int, Field(ge=1)] = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: Annotated[int, Field(ge=1)] = 50_000_000
    """Bytes of passes that one client sends at once, before compression."""
    parallel_fwdbwd_chunks: bool = True
    sample_use_retrieve_futures: bool = False
    """Poll once for all samples of a sampler rather than once for each."""
    sample_max_concurrent_requests: Annotated[int, Field(ge=1)] = 2000
    """Samples of one client that may be on their way at once where it does not."""
    use_pyqwest_transport: bool = True
    cotrain_max_pass_bytes: Annotated[int, Field(ge=1)] | None = None
    """What one pass may have, before compression, where the server is one of ours: a pass goes whole."""
    cotrain_version: str | None = None
    """Version of the server, where it is one of ours."""
    cotrain_protocol: int | None = None
    """A client of ours that speaks another one must not go on; see `cotrain.version`."""


class ClientDynamicConfigResponse(WireModel):
    """What a client asks again from time to time."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(WireModel):
    """POST auth/token: a token to use in place of the key."""

    jwt: str


class CreateSessionRequest(WireModel):
    """POST create_session."""

    tags: list[str] = Field(default=[], max_length=256)
    user_metadata: dict[str, Any] | None = None
    sdk_version: Annotated[str, Field(max_length=256)] = ""
    project_id: Name | None = None
    display_name: Name | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(WireModel):
    """The session's id, and what the server wants its user to read."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(WireModel):
    """POST session_heartbeat, every 10 s."""

    session_id: Name
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(WireModel):
    """The session lives on."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(WireModel):
    """Why a session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(WireModel):
    """POST sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None


class SupportedModel(WireModel):
    """One base model and what can be done with it."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(WireModel):
    """GET get_server_capabilities."""

    supported_models: list[SupportedModel]


class HealthResponse(WireModel):
    """GET healthz."""

    status: Literal["ok"] = "ok"


class TelemetryResponse(WireModel):
    """POST telemetry: received."""

    status: Literal["accepted"] = "accepted"
