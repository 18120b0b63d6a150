"""JSON messages of checkpoints: save, load, copy, expire, download and upload.

The limits here are those of the message format; the server checks names, expiry and ownership of a path.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from cotrain.wire.model import Listed, ModelSeqId, Name, Path, Seconds, SequencedRequest, WireModel
from cotrain.wire.rest import CheckpointType
from cotrain.wire.runs import LoraConfig, UntypedAPIFuture

__all__ = [
    "CopyWeightsRequest", "CopyWeightsResponse", "ExternalWeightsUploadFinishRequest",
    "ExternalWeightsUploadFinishResponse", "ExternalWeightsUploadStartRequest",
    "ExternalWeightsUploadStartResponse", "ExternalWeightsUrlsResponse", "LoadWeightsRequest",
    "LoadWeightsResponse", "ParsedCheckpointTinkerPath", "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse", "SaveWeightsRequest", "SaveWeightsResponse", "WeightsInfoResponse",
    "WhoamiResponse",
]  # fmt: skip

Credential = Annotated[str, Field(min_length=1, max_length=4096)]
UserMetadata = dict[str, str]

SCHEME = "tinker://"
TYPE_BY_KIND: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


# ---- Path ----------------------------------------------------------------------------------------


class ParsedCheckpointTinkerPath(WireModel):
    """Parts of a checkpoint's path."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str
    """`<kind>/<name>`."""

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Parse `tinker://<run>/<kind>/<name>`. Raises ValueError if it is malformed."""
        run, kind, name = (tinker_path.removeprefix(SCHEME).split("/") + [""] * 3)[:3]
        whole = f"{SCHEME}{run}/{kind}/{name}" == tinker_path and run and name
        if not whole or kind not in TYPE_BY_KIND:
            raise ValueError(f"{tinker_path!r} is not {SCHEME}<run>/<kind>/<name>")
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=TYPE_BY_KIND[kind],
            checkpoint_id=f"{kind}/{name}",
        )


# ---- Save ----------------------------------------------------------------------------------------


class SaveWeightsRequest(SequencedRequest):
    """POST save_weights: save weights and optimizer state, for later training."""

    path: Name | None = None
    """Name of the checkpoint; the default is its position in the run's order."""
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    """Move the name from an older checkpoint, which is kept until this one is stored."""
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(WireModel):
    """Result of save_weights: the checkpoint is stored."""

    path: str
    type: Literal["save_weights"] | None = "save_weights"


class SaveWeightsExternalRequest(SequencedRequest):
    """POST save_weights_external: save the adapter as files to download."""

    path: Name
    ttl_seconds: Seconds | None = None
    user_metadata: UserMetadata | None = None
    age_encryption_recipients: Listed[Annotated[str, Field(max_length=4096)]] | None = None
    """`age1…` recipients: every file is encrypted for all of them and its name ends in `.age`."""
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(WireModel):
    """Result of save_weights_external: the files are stored."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = "save_weights_external"


# ---- Load ----------------------------------------------------------------------------------------


class LoadRequest(WireModel):
    """Fields of both load requests."""

    path: Path
    optimizer: bool = False
    """Restore Adam's moments and step count; otherwise the optimizer state is new."""
    weights_access_token: Credential | None = None
    """API key of the tenant that owns the checkpoint, if that is another tenant."""
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsRequest(LoadRequest, SequencedRequest):
    """POST load_weights with `model_id`: replace the state of a run by a checkpoint's."""


class OptimizerChoice(WireModel):
    """Optimizer of a new run, adamw or muon; the server rejects others."""

    type: str = "adamw"


class CreateFromWeightsRequest(LoadRequest):
    """POST load_weights with `session_id`: create a run with the state of a checkpoint."""

    session_id: Name
    model_seq_id: ModelSeqId
    base_model: Name | None = None
    """Base model of the checkpoint, or None."""
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerChoice | None = None
    """None: AdamW, or that of the loaded optimizer state."""


class LoadWeightsResponse(WireModel):
    """Result of load_weights: the checkpoint is loaded."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = "load_weights"


class WeightsInfoRequest(WireModel):
    """POST weights_info: request the settings that a run needs to load a checkpoint."""

    tinker_path: Path


class WeightsInfoResponse(WireModel):
    """Settings of the run that saved a checkpoint."""

    base_model: str
    optimizer_config: OptimizerChoice = OptimizerChoice()
    is_lora: bool = True
    lora_rank: int | None = None
    lora_alpha: float | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


# ---- Copy and expire -----------------------------------------------------------------------------


class CopyWeightsRequest(WireModel):
    """POST copy_weights: copy a checkpoint to a run of its own, without copying the bytes.

    The new run belongs to a session, with a `model_seq_id`, or to a project.
    """

    source_path: Path
    session_id: Name | None = None
    model_seq_id: ModelSeqId | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: Credential | None = None


class CopyWeightsResponse(WireModel):
    """Path of the copy."""

    tinker_path: str


class CheckpointTtlRequest(WireModel):
    """PUT …/ttl: set the expiry of a checkpoint in seconds from now; None removes it."""

    ttl_seconds: Seconds | None


# ---- Download ------------------------------------------------------------------------------------


class ExternalWeightsUrlsResponse(WireModel):
    """GET …/external_weights_urls: links to each file of a checkpoint, which need no key."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(WireModel):
    """GET …/archive: link to a tar of all files of a checkpoint, which needs no key."""

    url: str
    expires: datetime


# ---- Upload: an adapter trained elsewhere becomes a checkpoint -------------------------------------


class UploadQuery(WireModel):
    """POST training_runs/upload: query parameters, the settings of the checkpoint whose archive is the body."""

    base_model: Name
    name: Name
    """Name of the checkpoint."""
    session_id: Name | None = None
    model_seq_id: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """With session and number, a repeated upload is the same upload; without, it gets a session of its own."""
    ttl_seconds: int | None = None
    user_metadata: Annotated[str | None, Field(max_length=2**14)] = None
    """A JSON object of texts, stored with the checkpoint; an HTTP server accepts no longer request line."""


class UploadResponse(UntypedAPIFuture):
    """Response to a queued upload: `request_id` resolves when the checkpoint is stored."""

    import_request_id: str
    """Resolves earlier: when the adapter fits its base model, or with the reason why it does not."""
    path: str
    """Path of the future checkpoint."""


class UploadedResponse(WireModel):
    """POST checkpoints/upload: the upload is stored."""

    path: str
    """Path of the checkpoint."""


class ExternalWeightsUploadStartRequest(WireModel):
    """POST external_weights_upload_start: request a URL for each file of an adapter."""

    base_model: Name
    lora_config: LoraConfig
    """Rank and modules of the adapter. Its alpha is that of its adapter_config.json."""
    destination_project_id: Name | None = None
    """Project of the checkpoint."""


class ExternalWeightsUploadStartResponse(WireModel):
    """Started upload: PUT each file to its URL, which needs no key, and finish."""

    upload_id: str
    urls: dict[str, str]
    """URL by file name."""
    expires: datetime
    """End of the URLs and of the upload."""


class ExternalWeightsUploadFinishRequest(WireModel):
    """POST external_weights_upload_finish: make a checkpoint of the files."""

    upload_id: Annotated[str, Field(min_length=1, max_length=2**14)]


class ExternalWeightsUploadFinishResponse(WireModel):
    """Path of the checkpoint, which is stored."""

    tinker_path: str


# ---- Key -----------------------------------------------------------------------------------------


class OrganizationDetails(WireModel):
    """Organisation of a key: on this server, its tenant."""

    name: str


class UserDetails(WireModel):
    """User of a key; this server has only tenants."""

    email: str


class KeyDetails(WireModel):
    """Owner of a key."""

    org_details: OrganizationDetails
    user_details: UserDetails


class WhoamiResponse(WireModel):
    """Owner of a key, from the token issued for it."""

    user_urn: str
    """On this server, the tenant."""
    org_urn: str
    email: str | None = None
    """None: this server has tenants, but no users."""


class ApiKeyResponse(WireModel):
    """GET auth/apikey/me: description of the key that was sent."""

    key_id: int
    name: str
    note: str
    details: KeyDetails
