"""Lists of what a tenant has: runs, checkpoints, sessions, and how to search sessions.

Times are UTC. Metadata is text by name on the wire; what a client stored otherwise is shown as JSON.
"""

from __future__ import annotations

from datetime import datetime  # pydantic reads it at run time
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from cotrain.wire.model import Name, WireModel

AccessScope = Literal["owned", "accessible"]
"""`accessible`: also what others published."""
CheckpointType = Literal["training", "sampler", "external"]
FinishReasonType = Literal["success", "errored", "interrupted"]

MAX_PAGE = 1_000
MAX_SEARCH_PAGE = 200
MAX_SEARCHED = 1_000
"""Projects, or kinds of status, that one search names: each session is compared with all of them."""


Note = Annotated[str, Field(max_length=2_000)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]
Tags = Annotated[list[Tag], Field(max_length=16)]


class Cursor(WireModel):
    """Which part of a list a page is."""

    offset: int
    limit: int
    total_count: int


# ---- Checkpoints and runs ------------------------------------------------------------------------


class Checkpoint(WireModel):
    """One checkpoint, as lists show it."""

    checkpoint_id: str
    """`<kind>/<name>`."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    """None: kept until it is deleted."""


class CheckpointsListResponse(WireModel):
    """GET training_runs/{run}/checkpoints, without a cursor, and GET checkpoints, with one."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(WireModel):
    """One run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    """The server stopped it: its recovery did not reproduce the stored results."""
    lora_rank: int | None = None
    lora_alpha: float | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    """The newest of kind `weights`."""
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    weights_epoch: int = 0
    """How often its newest state was lost with a disk, and it went on from a checkpoint."""
    rolled_back_to: str | None = None
    """The path of the last such checkpoint."""
    note: str | None = None
    tags: list[str] = Field(default=[])
    waiting: str | None = None
    """What its requests wait for where a seq_id is missing; of one run of your own, asked for by its id."""


class UpdateTrainingRunRequest(WireModel):
    """PATCH training_runs/{run}: what is not named stays."""

    note: Note | None = None
    """An empty one takes it away."""
    tags: Tags | None = None
    """All that the run shall have from now on."""


class TrainingRunsResponse(WireModel):
    """GET training_runs: newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


# ---- History -------------------------------------------------------------------------------------


class HistoryPoint(WireModel):
    """One optimizer step of a run with the passes that went into it, or the forwards between two steps."""

    kind: Literal["optim_step", "forward"]
    step: int
    """Optimizer steps of the run up to this one, from 1; of forwards, up to then, from 0."""
    steps: int
    """How many points in a row this one stands for, itself the newest: 1 until there are more than 1,024."""
    seq: int
    """Of the run's log: the optimizer step, or the newest of the forwards."""
    time_s: float
    """When its result appeared, in seconds since the epoch."""
    loss_sum: float
    """`loss:sum` of the passes, added up in their order."""
    weight_sum: float
    """Of all weights of the passes; of a loss without weights, the number of advantages other than 0."""
    grad_norm: float | None = None
    """L2, before clipping; None for forwards."""
    learning_rate: float | None = None
    """None for forwards."""
    tokens: int
    """That the base model read in those passes."""
    run_tokens: int
    """The like, of all passes with a gradient since the run began."""
    passes: int

    @property
    def loss(self) -> float:
        """Loss per weight; the sum itself where there is no weight."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else self.loss_sum


class TrainingRunHistory(WireModel):
    """GET training_runs/{run}/history."""

    training_run_id: str
    points: list[HistoryPoint]
    """In the order of the run's log."""


# ---- Sessions ------------------------------------------------------------------------------------


class ListSessionsResponse(WireModel):
    """GET sessions: newest first."""

    sessions: list[str]


class GetSessionResponse(WireModel):
    """GET sessions/{id}."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class AssignProjectRequest(WireModel):
    """PUT sessions/{id}/project."""

    project_id: Name


class TraceExportResponse(WireModel):
    """GET sessions/{id}/trace_export."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


# ---- Search --------------------------------------------------------------------------------------


class OwnSearchOwner(WireModel):
    """The caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(WireModel):
    """Every session the caller may see: here, its own."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(WireModel):
    """The sessions of these owners."""

    type: Literal["user"] = "user"
    owner_urns: list[Name] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[
    OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")
]


class ActiveStatusQuery(WireModel):
    """Not finished, and a heartbeat came within the last minutes."""

    type: Literal["active"] = "active"


class CancelledStatusQuery(WireModel):
    """Cancelled from a console: never, here."""

    type: Literal["cancelled"] = "cancelled"


class FailedStatusQuery(WireModel):
    """Failed by one of its runs."""

    type: Literal["failed"] = "failed"


class ClientFinishedStatusQuery(WireModel):
    """Its client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reasons: list[FinishReasonType] | None = Field(default=None, min_length=1)


StatusQuery = Annotated[
    ActiveStatusQuery | CancelledStatusQuery | FailedStatusQuery | ClientFinishedStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(WireModel):
    """Where the next page starts."""

    last_created_at: AwareDatetime
    last_session_id: Name


class SessionSearchRequest(WireModel):
    """POST sessions/search. What is not named matches everything."""

    session_id: str | None = None
    project_ids: list[Name] | None = Field(default=None, max_length=MAX_SEARCHED)
    user_metadata: dict[str, str] = Field(default={})
    """Every pair must hold."""
    display_name: str | None = Field(default=None, min_length=1, max_length=1024)
    """Each of its words is part of the name. With `session_id`, one of both must match."""
    tags: list[Tag] | None = Field(default=None, max_length=16)
    """A run of the session has all of them."""
    text: str | None = Field(default=None, min_length=1, max_length=1024)
    """Each of its words stands in the note or in a tag of one run of the session."""
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1, max_length=MAX_SEARCHED)
    limit: int = Field(default=50, ge=1, le=MAX_SEARCH_PAGE)
    cursor: SessionSearchCursor | None = None


class SessionActive(WireModel):
    """Not finished, and a heartbeat came within the last minutes."""

    type: Literal["active"] = "active"


class FinishReason(WireModel):
    """What the client said when it was done."""

    type: FinishReasonType


class SessionFinished(WireModel):
    """Its client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class FailedRunReason(WireModel):
    """Which run failed it."""

    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailed(WireModel):
    """The server stopped one of its runs."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"] = "internal"
    reason: FailedRunReason
    message: str


SessionStatus = Annotated[
    SessionActive | SessionFinished | SessionFailed, Field(discriminator="type")
]


class SessionSummary(WireModel):
    """One session that was found."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    """Empty for a session in no project."""
    status: SessionStatus | None = None
    """None: it has not finished, but sent no heartbeat for minutes."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(WireModel):
    """One page, newest first. It may be short, even empty, while there is a next one."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
