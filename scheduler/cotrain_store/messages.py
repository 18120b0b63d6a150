"""What crosses a process: ops, plans, results and records, as plain frozen data.

Ids are strings that a client sees; everything else here is ours. JSON written by one version is
read by the next one (unknown fields are ignored), so that a rolling upgrade loses nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NewType, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
PoolId = NewType("PoolId", str)
WorkerId = NewType("WorkerId", str)
SamplerId = NewType("SamplerId", str)
#: Sampler weights are named by the save that made them: `<run>:<seq>`, its request id.
WeightsRef = NewType("WeightsRef", str)

Category = Literal["user", "server", "unknown"]
CheckpointKind = Literal["weights", "sampler_weights"]
_Message = TypeVar("_Message")


class OpKind(StrEnum):
    """One op asked for by a tenant; the value is what the log stores."""

    #: Make the run's adapter. Always seq 0.
    CREATE = "create"
    #: Log-probs and losses, no gradient.
    FORWARD = "forward"
    #: Log-probs, losses, and the gradient added to what the run has accumulated.
    FORWARD_BACKWARD = "forward_backward"
    #: AdamW on the accumulated gradient, then zero it. A barrier for its own run.
    OPTIM_STEP = "optim_step"
    #: Copy the adapter out for sampling, as the ops before it left it.
    SAVE = "save"
    #: A request that failed validation: it only takes its place in the order and fails.
    REJECTED = "rejected"


class RunState(StrEnum):
    """Where one run is in its life."""

    #: Takes requests.
    LIVE = "live"
    #: Unloaded by its tenant, or its session finished: takes no more requests.
    CLOSED = "closed"
    #: Stopped by the server because a replay did not give the same numbers.
    FAILED = "failed"


@dataclass(frozen=True)
class LoraSpec:
    """The adapter a run trains; `alpha` is 32 for every rank, as the hosted services have it."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0


@dataclass(frozen=True)
class Tenant:
    """Who pays and is isolated: the owner of every record."""

    id: TenantId
    name: str


@dataclass(frozen=True)
class SessionRecord:
    """One client process's connection."""

    id: SessionId
    tenant: TenantId
    created_at: float
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    finished_at: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One LoRA training. Immutable but for `state`."""

    id: RunId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    lora: LoraSpec
    created_at: float
    user_metadata: dict[str, Any] = field(default_factory=dict)
    state: RunState = RunState.LIVE


@dataclass(frozen=True)
class PoolRecord:
    """One base model and what its workers measured about it: all the API needs to check requests."""

    id: PoolId
    base_model: str
    architecture: str
    vocab_size: int
    context_length: int
    max_rank: int
    num_parameters: int
    device: str
    dtype: str
    numerics_id: str
    tokens_per_s: float
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: str = ""
    """Its folder's name under `<data_dir>/tokenizers/`; empty where the base model has none."""
    max_sequence_tokens: int = 0
    """What a prompt and its continuation may have together; 0 where the pool does not sample."""
    sampler: Literal["", "engine", "vllm"] = ""


@dataclass(frozen=True)
class SaveRequest:
    """The body of a SAVE op: keep the weights under a name, or make a sampler of them at once.

    Exactly one of `name` and `sampler` is set.
    """

    name: str | None = None
    sampler: SamplerId | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplerRecord:
    """One tenant's sampling session. Immutable: it never sees later weights."""

    id: SamplerId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    model_path: str | None
    """The path it was made from, as the client wrote it."""
    weights: WeightsRef | None
    """None: the base model alone."""
    ephemeral: bool
    """Made by a save without a name: nothing but this sampler refers to its weights."""
    created_at: float


@dataclass(frozen=True)
class WeightsRecord:
    """Sampler weights: an immutable copy of a run's adapter. Lives as long as something uses it."""

    ref: WeightsRef
    run: RunId
    tenant: TenantId
    pool: PoolId
    worker: WorkerId
    """Who made the copy, and alone has it until it is stored."""
    base_model: str
    lora: LoraSpec
    created_at: float
    digest: str = ""
    """Names the folder that holds it; empty until that is durable."""
    size: int = 0
    """Bytes of that folder."""


@dataclass(frozen=True)
class CheckpointRecord:
    """A name that a tenant gave to a copy of its run; naming again moves the name."""

    run: RunId
    tenant: TenantId
    kind: CheckpointKind
    name: str
    weights: WeightsRef
    base_model: str
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """How its tenant asks for it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SaveRecords:
    """What the commit of a save writes beside its result: the weights, and what refers to them."""

    weights: WeightsRecord
    user: CheckpointRecord | SamplerRecord


@dataclass(frozen=True)
class QueuedOp:
    """The envelope of one accepted op: all the scheduler reads. The body stays closed to it."""

    run: RunId
    seq: int
    kind: OpKind
    tokens: int
    ref: str
    """Where the body is: `inline` (beside the op, in Redis) or a spool reference."""
    size: int
    """Bytes of the body."""
    accepted_at: float

    def envelope(self) -> str:
        """Write what the log stores under this seq; the scripts read its first and last field."""
        return f"{self.kind}|{self.tokens}|{self.size}|{self.accepted_at!r}|{self.ref}"

    @classmethod
    def parse(cls, run: RunId, seq: int, envelope: str) -> QueuedOp:
        """Read `envelope` back."""
        kind, tokens, size, accepted_at, ref = envelope.split("|", 4)
        return cls(run, seq, OpKind(kind), int(tokens), ref, int(size), float(accepted_at))

    @property
    def request_id(self) -> RequestId:
        """The id its future is polled under; derived, so that a repeated POST gets the same one."""
        return request_id(self.run, self.seq)


@dataclass(frozen=True)
class RunQueue:
    """The ops of one run that may run next: contiguous in seq, starting at the first unplanned."""

    run: RunId
    tenant: TenantId
    worker: WorkerId | None
    ops: tuple[QueuedOp, ...]


@dataclass(frozen=True)
class Step:
    """The part of a cycle that one worker runs at once. A replay re-runs it as it stands."""

    cycle: int
    worker: WorkerId
    ops: tuple[QueuedOp, ...]
    planned_at: float
    tenant_by_run: dict[RunId, TenantId]

    @classmethod
    def parse(cls, text: str | bytes) -> Step:
        """Read what `encode` wrote."""
        raw = json.loads(text)
        raw["ops"] = tuple(
            decode(QueuedOp, {**op, "kind": OpKind(op["kind"])}) for op in raw["ops"]
        )
        return decode(cls, raw)


class ResultKind(StrEnum):
    """How a result's payload is encoded."""

    #: A JSON object, answered as it is.
    JSON = "j"
    #: A serialized ForwardBackwardOutput message.
    PASS = "p"  # noqa: S105  # a forward pass
    #: `{"error": …, "category": …}`: the op failed.
    FAILURE = "e"
    #: A large ForwardBackwardOutput message; the payload is its spool reference.
    SPOOLED_PASS = "r"  # noqa: S105
    #: A serialized SampleResponse message.
    SAMPLE = "s"
    #: A large SampleResponse message; the payload is its spool reference.
    SPOOLED_SAMPLE = "t"


@dataclass(frozen=True)
class Result:
    """What a future resolves to."""

    kind: ResultKind
    payload: bytes

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Result:
        """Encode a JSON object."""
        return cls(ResultKind.JSON, json.dumps(value, separators=(",", ":")).encode())

    @classmethod
    def failed(cls, message: str, category: Category) -> Result:
        """Encode a failure: a category and a sentence the tenant can act on."""
        payload = json.dumps({"error": message, "category": category}, separators=(",", ":"))
        return cls(ResultKind.FAILURE, payload.encode())

    def pack(self) -> bytes:
        """Write as one Redis value."""
        return self.kind.encode() + self.payload

    @classmethod
    def unpack(cls, value: bytes) -> Result:
        """Read `pack` back."""
        return cls(ResultKind(value[:1].decode()), value[1:])

    def json(self) -> dict[str, Any]:
        """Decode a JSON or failure payload."""
        decoded: dict[str, Any] = json.loads(self.payload)
        return decoded


def request_id(run: RunId, seq: int) -> RequestId:
    """Name the request with this place in its run's order."""
    return RequestId(f"{run}:{seq}")


def run_of(request: RequestId) -> RunId:
    """Name the run a request id belongs to; the inverse of `request_id`."""
    return RunId(request.rpartition(":")[0])


def run_id(session: SessionId, model_seq_id: int) -> RunId:
    """Name a run the way SDK 0.38 hard-codes it for runs made by loading a checkpoint."""
    return RunId(f"{session}:train:{model_seq_id}")


def sampler_id(session: SessionId, sampling_seq_id: int) -> SamplerId:
    """Name the sampler that a client made as its n-th."""
    return SamplerId(f"{session}:sample:{sampling_seq_id}")


def sample_id(sampler: SamplerId, seq: int) -> RequestId:
    """Name a sample request by its sampler and the number its client gave it (64 bits)."""
    return RequestId(f"{sampler}:{seq}")


def encode(record: Any) -> str:
    """Write a dataclass of this module as compact JSON."""
    return json.dumps(asdict(record), separators=(",", ":"))


def decode(message: type[_Message], raw: Mapping[str, Any]) -> _Message:
    """Build a message of what `encode` wrote, in this version or the next: unknown fields are dropped."""
    known = {field.name for field in fields(message)}  # type: ignore[arg-type]  # always a dataclass
    return message(**{name: value for name, value in raw.items() if name in known})
