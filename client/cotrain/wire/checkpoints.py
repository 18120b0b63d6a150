"""The JSON shapes of checkpoints: to save, load, copy, keep and download them.

The limits here are those of the shapes; names, lifetimes and whose a path is, the server checks.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from cotrain.wire.model import Listed, ModelSeqId, Name, SequencedRequest, WireModel
from cotrain.wire.runs import UntypedAPIFuture

#: `tinker://<run>/<kind>/<name>`.
Path = Annotated[str, Field(min_length=1, max_length=1024)]
Seconds = Annotated[int, Field(ge=1, lt=2**40)]
Credential = Annotated[str, Field(min_length=1, max_length=4096)]
UserMetadata = dict[str, str]

SCHEME = "tinker://"
TYPE_BY_KIND: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


# ---- Path ----------------------------------------------------------------------------------------


class ParsedCheckpointTinkerPath(WireModel):
    """What a checkpoint's path says."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    checkpoint_id: str
    """`<kind>/<name>`."""

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Read `tinker://<run>/<kind>/<name>`. Raises ValueError where it is none."""
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
    """POST save_weights: keep the weights and the optimizer's state, to train on from later."""

    path: Name | None = None
    """The checkpoint's name; without one, it is named by its place in the run's order."""
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    """Let the name move on from an older checkpoint; that one stays until this one is stored."""
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(WireModel):
    """The checkpoint is stored."""

    path: str
    type: Literal["save_weights"] | None = "save_weights"


class SaveWeightsExternalRequest(SequencedRequest):
    """POST save_weights_external: keep the adapter as files to download."""

    path: Name
    ttl_seconds: Seconds | None = None
    user_metadata: UserMetadata | None = None
    age_encryption_recipients: Listed[Annotated[str, Field(max_length=4096)]] | None = None
    """`age1…` recipients: every file is encrypted to all of them and ends in `.age`."""
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(WireModel):
    """The files are stored."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = "save_weights_external"


# ---- Load ----------------------------------------------------------------------------------------


class LoadRequest(WireModel):
    """What to load, whatever into."""

    path: Path
    optimizer: bool = False
    """Whether Adam's moments and step count are restored; else the optimizer starts anew."""
    weights_access_token: Credential | None = None
    """A key of the tenant that the checkpoint belongs to, where that is another one."""
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsRequest(LoadRequest, SequencedRequest):
    """POST load_weights, with `model_id`: replace what a run has by what a checkpoint holds."""


class OptimizerChoice(WireModel):
    """The optimizer of a new run; AdamW is the only one here, which the server says."""

    type: str = "adamw"


class CreateFromWeightsRequest(LoadRequest):
    """POST load_weights, with `session_id`: start a run with what a checkpoint holds."""

    session_id: Name
    model_seq_id: ModelSeqId
    base_model: Name | None = None
    """The base model of the checkpoint, or nothing."""
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class LoadWeightsResponse(WireModel):
    """The checkpoint is loaded."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = "load_weights"


class WeightsInfoRequest(WireModel):
    """POST weights_info: ask what a run must be like to load a checkpoint."""

    tinker_path: Path


class WeightsInfoResponse(WireModel):
    """What the run was like that made a checkpoint."""

    base_model: str
    optimizer_config: OptimizerChoice = OptimizerChoice()
    is_lora: bool = True
    lora_rank: int | None = None
    lora_alpha: float | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


# ---- Keep ----------------------------------------------------------------------------------------


class CopyWeightsRequest(WireModel):
    """POST copy_weights: another name for a checkpoint, under a run of its own.

    It goes to a session's place for a run, or to a project.
    """

    source_path: Path
    session_id: Name | None = None
    model_seq_id: ModelSeqId | None = None
    destination_project_id: Name | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: Credential | None = None


class CopyWeightsResponse(WireModel):
    """Where the copy is."""

    tinker_path: str


class CheckpointTtlRequest(WireModel):
    """PUT …/ttl: let a checkpoint expire so long from now, or never."""

    ttl_seconds: Seconds | None


# ---- Download ------------------------------------------------------------------------------------


class ExternalWeightsUrlsResponse(WireModel):
    """GET …/external_weights_urls: where each file of a checkpoint can be fetched, without a key."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(WireModel):
    """GET …/archive: where all files of a checkpoint can be fetched as one tar, without a key."""

    url: str
    expires: datetime


# ---- Upload: an adapter that was made elsewhere becomes a checkpoint -------------------------------


class UploadQuery(WireModel):
    """POST training_runs/upload: what the archive in its body is to become, in the query."""

    base_model: Name
    name: Name
    """The checkpoint's name."""
    session_id: Name | None = None
    model_seq_id: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """With both, an upload that is sent again is the same one; without, it gets a session of its own."""
    ttl_seconds: int | None = None
    user_metadata: Annotated[str | None, Field(max_length=2**14)] = None
    """A JSON object of texts, kept with the checkpoint; an HTTP server takes no longer request line."""


class UploadResponse(UntypedAPIFuture):
    """The upload is queued: `request_id` resolves when the checkpoint is stored."""

    import_request_id: str
    """Resolves before, when the adapter fits its base model, or says why it does not."""
    path: str
    """Where the checkpoint will be."""


class UploadedResponse(WireModel):
    """POST checkpoints/upload: the upload is stored."""

    path: str
    """Where the checkpoint is."""


# ---- Key -----------------------------------------------------------------------------------------


class OrganizationDetails(WireModel):
    """Who a key belongs to: here, its tenant."""

    name: str


class UserDetails(WireModel):
    """Who uses a key: this server knows tenants only."""

    email: str


class KeyDetails(WireModel):
    """Whose a key is."""

    org_details: OrganizationDetails
    user_details: UserDetails


class WhoamiResponse(WireModel):
    """Whose a key is, as the token that stands for it says."""

    user_urn: str
    """Here, the tenant."""
    org_urn: str
    email: str | None = None
    """None: this server knows tenants, not their people."""


class ApiKeyResponse(WireModel):
    """GET auth/apikey/me: what the shown key is."""

    key_id: int
    name: str
    note: str
    details: KeyDetails
