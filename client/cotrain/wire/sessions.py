"""JSON messages of a session: configuration, creation, heartbeats and end."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cotrain.wire.model import Name, WireModel
from cotrain.wire.rest import FinishReason

__all__ = [
    "AuthTokenResponse", "ClientConfigRequest", "ClientConfigResponse", "ClientDynamicConfigResponse",
    "CreateSessionRequest", "CreateSessionResponse", "FinishSessionRequest", "GetServerCapabilitiesResponse",
    "HealthResponse", "SessionHeartbeatRequest", "SessionHeartbeatResponse", "SupportedModel",
    "TelemetryResponse",
]  # fmt: skip


class ClientConfigRequest(WireModel):
    """POST client/config and client/dynamic_config: version of the client."""

    sdk_version: str = ""


class ClientConfigResponse(WireModel):
    """Configuration of a client by the server; the defaults are those of the hosted SDK."""

    pjwt_auth_enabled: bool = False
    proto_write_fwdbwd: bool = False
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: Annotated[int, Field(ge=1)] = 1024
    fwdbwd_max_chunk_bytes_count: Annotated[int, Field(ge=1)] = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: Annotated[int, Field(ge=1)] = 50_000_000
    """Maximum bytes of passes that one client sends at once, before compression."""
    parallel_fwdbwd_chunks: bool = True
    sample_use_retrieve_futures: bool = False
    """Poll once for all samples of a sampler instead of once for each."""
    sample_max_concurrent_requests: Annotated[int, Field(ge=1)] = 2000
    """Maximum number of concurrent samples of one client that polls once for each."""
    use_pyqwest_transport: bool = True
    custom_loss_server_side: bool = False
    """True if the server runs the custom losses of `create_custom_loss`."""
    cotrain_max_pass_bytes: Annotated[int, Field(ge=1)] | None = None
    """Maximum bytes of one pass before compression; only a cotrain server sends it, and receives passes whole."""
    cotrain_version: str | None = None
    """Version of the server; only a cotrain server sends it."""
    cotrain_protocol: int | None = None
    """Protocol version; a cotrain client with another version must stop; see `cotrain.version`."""


class ClientDynamicConfigResponse(WireModel):
    """Settings that a client fetches periodically."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(WireModel):
    """POST auth/token: token that replaces the key."""

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
    """Id of the session, and messages of the server for the user."""

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
    """Response to a heartbeat: the session is still active."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSessionRequest(WireModel):
    """POST sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None


class SupportedModel(WireModel):
    """Base model and its supported uses."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    tied_embeddings: bool | None = None
    """True if the unembedding is the embedding's matrix; None if the worker does not report it."""


class GetServerCapabilitiesResponse(WireModel):
    """GET get_server_capabilities."""

    supported_models: list[SupportedModel]


class HealthResponse(WireModel):
    """GET healthz."""

    status: Literal["ok"] = "ok"


class TelemetryResponse(WireModel):
    """POST telemetry: received."""

    status: Literal["accepted"] = "accepted"
