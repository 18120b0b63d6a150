"""Validation of checkpoint requests, and lookup of `tinker://` paths.

The checks are pure, and their messages are for the tenant. The lookup returns only checkpoints that
the tenant may read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyrage
from fastapi import Request

from cotrain_server.errors import Invalid, InvalidToken
from cotrain_server.http.auth import identify
from cotrain_server.http.responses import finite
from cotrain_server.services import Services
from cotrain_store.errors import AuthenticationFailed, CheckpointNotFound, MalformedPath, WeightsDeleted
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord, WeightsRecord

#: Bounds of a checkpoint's lifetime, as in the hosted services. Without one, it is kept until deleted.
MIN_TTL_S = 3_600
MAX_TTL_S = 10 * 365 * 24 * 3_600
MAX_METADATA_BYTES = 64 * 1024
MAX_RECIPIENTS = 64
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Path of the routes of a checkpoint. A name has no slash, so one called `publish` does not match the routes below it.
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
#: Errors that a tenant can cause by a path. The op keeps its position and fails.
WRONG_PATH = (Invalid, MalformedPath, CheckpointNotFound, WeightsDeleted)


@dataclass(frozen=True)
class Source:
    """A checkpoint, and the weights that it names now."""

    checkpoint: CheckpointRecord
    weights: WeightsRecord


def check_name(name: str) -> None:
    """Check the name of a checkpoint. Raises Invalid."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            "path (the argument `name` of clients) must be a name of 1 to 128 letters, digits, '.', '_' or '-' that starts with a "
            "letter or digit and has no '..'."
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """Check the lifetime of a checkpoint. Raises Invalid."""
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise Invalid(f"ttl_seconds must be between {MIN_TTL_S} and {MAX_TTL_S} (10 years).")


def check_metadata(metadata: Mapping[str, Any] | None, tags: Sequence[str] = ()) -> None:
    """Check the size and the numbers of metadata, and those of a session's tags. Raises Invalid."""
    for name, notes in (("user_metadata", metadata), ("tags", tags)):
        if notes and finite(notes) != notes:
            raise Invalid(f"{name} holds NaN, an infinity, or a number beyond ±1.8e308. Send that number as text.")
        if notes and len(json.dumps(notes)) > MAX_METADATA_BYTES:
            raise Invalid(f"{name} may have at most {MAX_METADATA_BYTES} bytes as JSON.")


def check_recipients(recipients: Sequence[str]) -> None:
    """Check the encryption recipients of an export. Raises Invalid."""
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise Invalid(f"age_encryption_recipients must have 1 to {MAX_RECIPIENTS} entries.")
    for number, recipient in enumerate(recipients):
        kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
        try:
            kind.Recipient.from_str(recipient)
        except pyrage.RecipientError as wrong:
            raise Invalid(
                f"age_encryption_recipients[{number}] is neither an age X25519 recipient nor an SSH public key."
            ) from wrong


async def check_loadable(services: Services, checkpoint: CheckpointRecord) -> None:
    """Raise Invalid for encrypted files, which are for their recipients alone."""
    if checkpoint.kind == "external_weights" and (await services.records.weights(checkpoint.weights)).external:
        raise Invalid(
            "Encrypted external_weights are for download only; load or sample from weights or sampler_weights."
        )


async def quota_reached(services: Services, tenant: TenantId) -> str:
    """Return the sentence for a tenant that has reached its quota of stored checkpoints, else ""."""
    quotas = await services.quotas.of(tenant)
    count, size_bytes = await services.checkpoints.stored_bytes(tenant)
    if count >= quotas.checkpoints:
        limit = f"{quotas.checkpoints} checkpoints"
    elif size_bytes >= quotas.checkpoint_bytes:
        limit = f"{quotas.checkpoint_bytes} bytes"
    else:
        return ""
    return f"Checkpoint storage quota reached ({limit}). Delete some that are not needed."


def check_optimizer(weights: WeightsRecord, *, optimizer: bool) -> None:
    """Raise Invalid if an optimizer state is requested but was not saved."""
    if optimizer and not weights.has_optimizer:
        raise Invalid("This checkpoint has no optimizer state; load it without.")


def check_fits(weights: WeightsRecord, run: RunRecord, *, optimizer: bool) -> None:
    """Check that a run can load a checkpoint. Raises Invalid with the properties of both.

    Weights with another alpha are scaled to the run's. An optimizer state cannot be scaled, because
    a step has the same size at every scale. The next steps would differ from those before the save.
    """
    if weights.base_model != run.base_model:
        raise Invalid(f"The checkpoint is of base model {weights.base_model}, the run of {run.base_model}.")
    if _shape(weights.lora) != _shape(run.lora):
        raise Invalid(f"The checkpoint has {_words(weights.lora)}; the run has {_words(run.lora)}.")
    if weights.lora.per_expert != run.lora.per_expert:
        raise Invalid(
            "One of the checkpoint and the run has matrices of its own for each expert, and the other shares them: "
            "start a run from the checkpoint, which takes its form."
        )
    if optimizer and weights.lora.optimizer != run.lora.optimizer:
        raise Invalid(
            f"The checkpoint has an optimizer state of {weights.lora.optimizer}, the run has {run.lora.optimizer}: "
            "load it without its optimizer state."
        )
    if optimizer and weights.lora.alpha != run.lora.alpha:
        raise Invalid(
            f"The checkpoint has alpha {weights.lora.alpha:g}, the run {run.lora.alpha:g}: load it "
            "without its optimizer state, or start a run from the checkpoint, which takes its alpha."
        )


def _shape(lora: LoraSpec) -> tuple[int, bool, bool, bool]:
    return lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed


def _words(lora: LoraSpec) -> str:
    rank, attn, mlp, unembed = _shape(lora)
    return f"rank {rank}, train_attn={attn}, train_mlp={mlp}, train_unembed={unembed}"


def path_of(run_id: str, kind: str, name: str) -> str:
    """Return the `tinker://` path for the parts of a URL. The records validate it."""
    return f"tinker://{run_id}/{kind}/{name}"


async def find_source(services: Services, reader: TenantId, path: str) -> Source:
    """Return a checkpoint of a tenant, or a published one, with its weights.

    Raises:
        MalformedPath: the path is malformed.
        CheckpointNotFound: unknown, expired, or another tenant's.
    """
    checkpoint = await services.records.checkpoint(reader, path)
    return Source(checkpoint, await services.records.weights(checkpoint.weights))


async def find_loadable(services: Services, reader: TenantId, path: str) -> Source:
    """Return the result of `find_source`. Raises Invalid for encrypted files."""
    source = await find_source(services, reader, path)
    await check_loadable(services, source.checkpoint)
    return source


async def reader_of(request: Request, services: Services, tenant: TenantId, access_token: str | None) -> TenantId:
    """Return the tenant that reads a path: the caller, or the owner of the access token.

    Raises:
        Invalid: the access token is not a valid key.
        TooManyFailures: the token is invalid, and this address has sent too many invalid ones.
    """
    if access_token is None:
        return tenant
    try:
        return (await identify(request, services, access_token)).id
    except (AuthenticationFailed, InvalidToken) as wrong:
        raise Invalid("weights_access_token is not a valid API key.") from wrong
