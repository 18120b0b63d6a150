"""What crosses a process: ops, plans, results and records, as plain frozen data.

Ids are strings that a client sees; everything else here is ours. JSON written by one version is
read by the next one (unknown fields are ignored), so that a rolling upgrade loses nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NewType, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
PoolId = NewType("PoolId", str)
WorkerId = NewType("WorkerId", str)
SamplerId = NewType("SamplerId", str)
#: Weights are named by the save that made them: `<run>:<seq>`, its request id.
WeightsRef = NewType("WeightsRef", str)

Category = Literal["user", "server", "unknown"]
FinishReason = Literal["success", "errored", "interrupted"]
#: `weights` has the optimizer state too, when its save says so; `external_weights` are to be fetched.
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
_Message = TypeVar("_Message")


class OpKind(StrEnum):
    """One op asked for by a tenant; the value is what the log stores."""

    #: Make the run's adapter. Always seq 0.
    CREATE = "create"
    #: Make the run's adapter of an uploaded one. Always seq 0.
    IMPORT = "import"
    #: Log-probs and losses, no gradient.
    FORWARD = "forward"
    #: Log-probs, losses, and the gradient added to what the run has accumulated.
    FORWARD_BACKWARD = "forward_backward"
    #: The like, of the KL divergence from a student to a reference.
    REVERSE_KL = "reverse_kl"
    #: AdamW on the accumulated gradient, then zero it. A barrier for its own run.
    OPTIM_STEP = "optim_step"
    #: Copy the adapter out, as the ops before it left it.
    SAVE = "save"
    #: Replace the adapter, and the optimizer state, by a checkpoint's. As seq 0 it makes the run.
    LOAD = "load"
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
    finish_reason: str = ""


@dataclass(frozen=True)
class RunRecord:
    """One LoRA training. Immutable but for `state` and what follows it.

    A copy of a checkpoint lies in a run of its own, which is closed from the start and has no log.
    """

    id: RunId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    lora: LoraSpec
    created_at: float
    user_metadata: dict[str, Any] = field(default_factory=dict)
    state: RunState = RunState.LIVE
    last_request_at: float | None = None
    weights_epoch: int = 0
    """How often the server lost its newest state and went on from a checkpoint."""
    rolled_back_to: str = ""
    """The path of the last such checkpoint."""


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
    kind: CheckpointKind = "sampler_weights"
    overwrite: bool = False
    """Of kind `weights`: take the name even if it is in use. The other kinds always take it."""
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    age_recipients: tuple[str, ...] = ()
    """Of kind `external_weights`: whom the files are encrypted to; nobody: they are as they are."""
    answer: dict[str, Any] = field(default_factory=dict)
    """Added to the result of the save, over what it says by itself."""
    last: bool = False
    """The run ends when this is stored."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read what `encode` wrote."""
        raw = json.loads(body)
        raw["age_recipients"] = tuple(raw.get("age_recipients", ()))
        return decode(cls, raw)


@dataclass(frozen=True)
class LoadSource:
    """Weights to load, and how much of them."""

    ref: WeightsRef
    coefficient: float = 1.0


@dataclass(frozen=True)
class LoadRequest:
    """The body of a LOAD op. Its weights are stored, and stay while the log needs them."""

    path: str
    """As the client wrote it: what the result names."""
    sources: tuple[LoadSource, ...]
    """One, or several to be added up."""
    optimizer: bool
    """Also the optimizer state; else it starts afresh."""
    lora: LoraSpec | None = None
    """Set at seq 0: it makes the run, with this adapter."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read what `encode` wrote."""
        raw = json.loads(body)
        raw["sources"] = tuple(decode(LoadSource, source) for source in raw["sources"])
        raw["lora"] = decode(LoraSpec, raw["lora"]) if raw.get("lora") else None
        return decode(cls, raw)


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
    """An immutable copy of a run's adapter, and of its optimizer state where a save asked for it.

    It lives as long as something uses it.
    """

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
    """Bytes of all its files."""
    optimizer_digest: str = ""
    """Names the file of the optimizer state; empty until that is durable, and where there is none."""
    has_optimizer: bool = False
    external: bool = False
    """Encrypted files of its own lie in `external_folder(ref)`."""


@dataclass(frozen=True)
class CheckpointRecord:
    """A name that a tenant gave to a copy of its run, once that is durable; naming again moves it."""

    run: RunId
    tenant: TenantId
    kind: CheckpointKind
    name: str
    weights: WeightsRef
    base_model: str
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    """Every tenant may read it."""
    size: int = 0
    """Bytes of its files."""

    @property
    def path(self) -> str:
        """How its tenant asks for it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class SaveRecords:
    """What a save leaves: the weights, and what refers to them.

    A sampler appears with the commit, a checkpoint when its weights are durable.
    """

    weights: WeightsRecord
    user: CheckpointRecord | SamplerRecord
    overwrite: bool = False
    """As its request says."""
    last: bool = False
    """As its request says."""


@dataclass(frozen=True)
class RunUsage:
    """What the ops of one run took in one step."""

    tokens: int
    device_s: float


@dataclass(frozen=True)
class SampleUsage:
    """What one sample request took. Of `prompt_tokens`, `cached_tokens` were not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0


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
    #: A large JSON object; the payload is its spool reference.
    SPOOLED_JSON = "k"
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


def seq_of(request: RequestId | WeightsRef) -> int:
    """Name the place in its run's order that a request id, or weights made by one, belong to."""
    return int(request.rpartition(":")[2])


def run_id(session: SessionId, model_seq_id: int) -> RunId:
    """Name a run the way SDK 0.38 hard-codes it for runs made by loading a checkpoint."""
    return RunId(f"{session}:train:{model_seq_id}")


def sampler_id(session: SessionId, sampling_seq_id: int) -> SamplerId:
    """Name the sampler that a client made as its n-th."""
    return SamplerId(f"{session}:sample:{sampling_seq_id}")


def sample_id(sampler: SamplerId, seq: int) -> RequestId:
    """Name a sample request by its sampler and the number its client gave it (64 bits)."""
    return RequestId(f"{sampler}:{seq}")


def external_folder(ref: WeightsRef) -> str:
    """Name the folder of the encrypted files of weights."""
    return hashlib.sha256(ref.encode()).hexdigest()


def encode(record: Any) -> str:
    """Write a dataclass of this module as compact JSON.

    Half a surrogate pair, which a tenant's text may hold, is no Unicode: the scripts could not read it.
    """
    text = json.dumps(asdict(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def decode(message: type[_Message], raw: Mapping[str, Any]) -> _Message:
    """Build a message of what `encode` wrote, in this version or the next: unknown fields are dropped."""
    known = {field.name for field in fields(message)}  # type: ignore[arg-type]  # always a dataclass
    return message(**{name: value for name, value in raw.items() if name in known})
