"""Messages that list runs, checkpoints and sessions of a tenant, and search sessions.

Times are UTC. On the wire, metadata values are texts; other values that a client stored are shown as JSON.
"""

from collections.abc import Iterator
from datetime import datetime  # pydantic reads it at run time
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field
from typing_extensions import override

from cotrain.wire.model import Name, SequencedRequest, WireModel

__all__ = [
    "AccessibleSearchOwner", "Checkpoint", "CheckpointSearchCursor", "CheckpointSearchRequest",
    "CheckpointSearchResponse", "CheckpointType", "CheckpointsListResponse", "Cursor", "GetSessionResponse",
    "HistoryPoint", "ListSessionsResponse", "OwnSearchOwner", "SearchOwner", "SessionActive", "SessionFailed",
    "SessionSearchCursor", "SessionSearchRequest", "SessionSearchResponse", "SessionStatus", "SessionSummary",
    "TrainingRun", "TrainingRunHistory", "TrainingRunsResponse", "UserSearchOwner",
]  # fmt: skip

AccessScope = Literal["owned", "accessible"]
"""`accessible` includes what other tenants published."""
CheckpointType = Literal["training", "sampler", "external"]
FinishReasonType = Literal["success", "errored", "interrupted"]

MAX_PAGE = 1_000
MAX_SEARCH_PAGE = 200
MAX_SEARCHED = 1_000
"""Maximum number of projects, and of statuses, in one search. Each session is compared with all of them."""


Note = Annotated[str, Field(max_length=2_000)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]
Tags = Annotated[list[Tag], Field(max_length=16)]


class Cursor(WireModel):
    """Position of a page in a list."""

    offset: int
    limit: int
    total_count: int


# ---- Checkpoints and runs ------------------------------------------------------------------------


class Checkpoint(WireModel):
    """Checkpoint in a list."""

    checkpoint_id: str
    """`<kind>/<name>`."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    """None: the checkpoint does not expire."""
    base_model: str | None = None
    step: int | None = None
    """Optimizer steps of its run before the save."""
    metrics: dict[str, float] | None = None
    """Metrics that its run received between that step and the save."""


class CheckpointsListResponse(WireModel):
    """GET training_runs/{run}/checkpoints, without a cursor, and GET checkpoints, with one."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(WireModel):
    """Run of a tenant."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    """The server stopped the run: its recovery did not reproduce the stored results."""
    lora_rank: int | None = None
    lora_alpha: float | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    """The newest checkpoint of kind `weights`."""
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    weights_epoch: int = 0
    """Number of rollbacks. In each, the newest state was lost with a disk, and the run continued from a checkpoint."""
    rolled_back_to: str | None = None
    """Path of the checkpoint of the last rollback."""
    note: str | None = None
    tags: list[str] = Field(default=[])
    waiting: str | None = None
    """Reason why its requests wait if a seq_id is missing; only set when the owner requests this run by id."""
    state: Literal["idle", "waiting", "ended", "failed"] | None = None
    """State of an own run. It is waiting while accepted requests are not done."""
    steps: int | None = None
    """Number of optimizer steps of an own run."""
    last_loss: float | None = None
    """Loss of the newest step in nats per token; None before the first step, and without weights."""
    failed_requests: int | None = None
    """Number of requests of an own run that failed."""
    rewind_from: int | None = None
    """Oldest step to which `run.rewind` can return; only set when the owner requests this run by id."""


WaitCause = Literal[
    "ended", "failed", "idle", "quota", "paused", "no_scheduler", "no_worker", "restarting", "restoring", "draining",
    "gap", "running", "large_pass", "disk", "gather", "share", "cycle",
]  # fmt: skip


class WaitReason(WireModel):
    """GET training_runs/{run}/why: the cause for which a run waits."""

    training_run_id: str
    cause: WaitCause
    reason: str
    """The cause in one sentence, with its numbers."""


class UpdateTrainingRunRequest(WireModel):
    """PATCH training_runs/{run}. Omitted fields keep their values."""

    note: Note | None = None
    """An empty note removes it."""
    tags: Tags | None = None
    """Complete new list of tags."""


class TrainingRunsResponse(WireModel):
    """GET training_runs: newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


# ---- History -------------------------------------------------------------------------------------


class HistoryPoint(WireModel):
    """Optimizer step of a run with its passes, or the forwards between two steps."""

    kind: Literal["optim_step", "forward"]
    step: int
    """Number of optimizer steps so far, including this one if it is a step."""
    steps: int
    """Number of consecutive points that this one replaces, itself included. It is 1 in a run of up to 1,024 points."""
    seq: int
    """Seq of the optimizer step, or of the newest forward, in the run's log."""
    time_s: float
    """Time when its result was available, in seconds since the epoch."""
    loss_sum: float
    """Sum of `loss:sum` of the passes, in their order."""
    weight_sum: float
    """Sum of the weights, or the number of non-zero advantages if the loss has no weights."""
    grad_norm: float | None = None
    """L2 norm before clipping; None for forwards."""
    learning_rate: float | None = None
    """None for forwards."""
    tokens: int
    """Tokens that the base model processed in those passes."""
    run_tokens: int
    """Tokens of all passes with a gradient since the run was created."""
    passes: int
    rollout_gap: float | None = None
    """Mean distance of log-probs from those at sampling, in nats. Without a policy loss, this and the next two are None."""
    rollout_gap_max: float | None = None
    effective_sample_size: float | None = None
    """Share of the sampled tokens: 1 without drift. Of several passes, their mean by tokens."""
    clip_fraction: float | None = None
    """Share of the tokens with an advantage whose ratio is out of bounds; None for losses without bounds."""
    policy_lag: float | None = None
    """Mean number of optimizer steps between sampling and training; None without a `policy_step`."""
    policy_lag_max: float | None = None

    @property
    def loss(self) -> float:
        """Loss per weight; the sum if the weights sum to 0."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else self.loss_sum


class MetricPoint(WireModel):
    """Value of an own metric, or of an evaluation."""

    step: int
    """Number of optimizer steps before it."""
    steps: int
    """Number of consecutive points that this one replaces, itself included."""
    seq: int
    """Seq of its request in the run's log."""
    time_s: float
    """Time when it was recorded, in seconds since the epoch."""
    value: float


class TrainingRunHistory(WireModel):
    """GET training_runs/{run}/history."""

    training_run_id: str
    points: list[HistoryPoint]
    """Points in the order of the run's log."""
    metrics: dict[str, list[MetricPoint]] = Field(default={})
    """Metrics of `run.log` and `run.evaluate` by name, each in the order of the run's log."""

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield "training_run_id", self.training_run_id
        yield "points", len(self.points)
        yield "metrics", sorted(self.metrics)


MAX_METRICS = 64
"""Maximum number of metrics in one request."""

MetricName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./@ -]{0,127}$")]
"""Up to 128 letters, digits, spaces, `_`, `.`, `/`, `@` and `-`, as in `eval/nll`."""


class LogMetricsRequest(SequencedRequest):
    """POST log_metrics: add metrics to the run's history, or start or end an evaluation."""

    metrics: dict[MetricName, float] = Field(default={}, max_length=MAX_METRICS)
    """Finite numbers by name."""
    evaluation: MetricName | None = None
    """Metric of an evaluation: the loss per weight of the forwards since its start."""
    passes: int = Field(default=0, ge=0, lt=2**31)
    """Number of these forwards; 0 starts the evaluation."""


class LogMetricsResponse(WireModel):
    """Result of log_metrics: the metrics are in the history."""

    type: Literal["log_metrics"] = "log_metrics"


class RewindRequest(SequencedRequest):
    """POST rewind: return a run to its state after an earlier optimizer step."""

    step: int = Field(ge=0, lt=2**53)
    """Number of optimizer steps at that state; 0 is the start of the run."""


class RewindResponse(WireModel):
    """Result of a rewind."""

    step: int
    """Number of optimizer steps of the run now."""
    seq: int
    """Seq in the run's log of the op after which it continues."""
    type: Literal["rewind"] = "rewind"


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
    """Search in the caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(WireModel):
    """Search in every session that the caller may read: on this server, its own."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(WireModel):
    """Search in the sessions of these owners."""

    type: Literal["user"] = "user"
    owner_urns: list[Name] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]


class ActiveStatusQuery(WireModel):
    """Search for sessions that are not finished and sent a heartbeat within the last 3 minutes."""

    type: Literal["active"] = "active"


class CancelledStatusQuery(WireModel):
    """Search for sessions cancelled from a console. This server has none."""

    type: Literal["cancelled"] = "cancelled"


class FailedStatusQuery(WireModel):
    """Search for sessions that failed with one of their runs."""

    type: Literal["failed"] = "failed"


class ClientFinishedStatusQuery(WireModel):
    """Search for sessions that their client finished, for one of these reasons if any are given."""

    type: Literal["client_finished"] = "client_finished"
    reasons: list[FinishReasonType] | None = Field(default=None, min_length=1)


StatusQuery = Annotated[
    ActiveStatusQuery | CancelledStatusQuery | FailedStatusQuery | ClientFinishedStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(WireModel):
    """Start of the next page."""

    last_created_at: AwareDatetime
    last_session_id: Name


class SessionSearchRequest(WireModel):
    """POST sessions/search. An omitted field matches every session."""

    session_id: str | None = None
    project_ids: list[Name] | None = Field(default=None, max_length=MAX_SEARCHED)
    user_metadata: dict[str, str] = Field(default={})
    """Key-value pairs; all must match."""
    display_name: str | None = Field(default=None, min_length=1, max_length=1024)
    """Words that must all be part of the name. With `session_id`, a match of either suffices."""
    tags: list[Tag] | None = Field(default=None, max_length=16)
    """Tags that one run of the session must all have."""
    text: str | None = Field(default=None, min_length=1, max_length=1024)
    """Words that must all occur in the note or the tags of one run of the session."""
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[StatusQuery] | None = Field(default=None, min_length=1, max_length=MAX_SEARCHED)
    limit: int = Field(default=50, ge=1, le=MAX_SEARCH_PAGE)
    cursor: SessionSearchCursor | None = None


class SessionActive(WireModel):
    """Status of a session that is not finished and sent a heartbeat within the last 3 minutes."""

    type: Literal["active"] = "active"


class FinishReason(WireModel):
    """Reason that a client reports when it finishes its session."""

    type: FinishReasonType


class SessionFinished(WireModel):
    """Status of a session that its client finished."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class FailedRunReason(WireModel):
    """Run that the server stopped."""

    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailed(WireModel):
    """Status of a session of which the server stopped a run."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"] = "internal"
    reason: FailedRunReason
    message: str


SessionStatus = Annotated[SessionActive | SessionFinished | SessionFailed, Field(discriminator="type")]


class SessionSummary(WireModel):
    """Session in a search result."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    """Empty for a session without a project."""
    status: SessionStatus | None = None
    """None: the session is not finished, but sent no heartbeat in the last 3 minutes."""
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class CheckpointSearchCursor(WireModel):
    """Start of the next page."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: Annotated[str, Field(min_length=1, max_length=512)]


class CheckpointSearchRequest(WireModel):
    """POST checkpoints/search. An omitted field matches every checkpoint."""

    project_ids: list[Name] | None = Field(default=None, max_length=MAX_SEARCHED)
    user_metadata: dict[str, str] = Field(default={})
    """Key-value pairs; all must match exactly."""
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: list[Name] | None = Field(default=None, max_length=MAX_SEARCHED)
    """Any of them; an empty list matches no checkpoint."""
    limit: int = Field(default=50, ge=1, le=MAX_SEARCH_PAGE)
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(WireModel):
    """Page of a search, newest first."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
    """None at the end."""


class SessionSearchResponse(WireModel):
    """Page of a search, newest first. It may be empty although `next_cursor` is set."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
