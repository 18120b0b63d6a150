"""Find what a `tinker://` path names, for a tenant that may read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_server.errors import Invalid, InvalidToken
from cotrain_server.http.auth import identify
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_store.errors import (
    AuthenticationFailed,
    CheckpointNotFound,
    MalformedPath,
    WeightsDeleted,
)

if TYPE_CHECKING:
    from fastapi import Request

    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.weights import CheckpointRecord, WeightsRecord

#: A name has no slash in it, so a checkpoint called `publish` is none of the routes below it.
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"

#: What a tenant can get wrong about a path; an op of a run's order takes its place and fails.
WRONG_PATH = (Invalid, MalformedPath, CheckpointNotFound, WeightsDeleted)


@dataclass(frozen=True)
class Source:
    """A checkpoint, and the weights that it names now."""

    checkpoint: CheckpointRecord
    weights: WeightsRecord


def path_of(run_id: str, kind: str, name: str) -> str:
    """Write the parts of a URL as the path they stand for; whether it is one, the records tell."""
    return f"tinker://{run_id}/{kind}/{name}"


async def find_source(services: Services, reader: TenantId, path: str) -> Source:
    """Find a checkpoint of a tenant, or one that is published, with its weights.

    Raises:
        MalformedPath: it is no such path.
        CheckpointNotFound: unknown, expired, or another tenant's.
    """
    checkpoint = await services.records.checkpoint(reader, path)
    return Source(checkpoint, await services.records.weights(checkpoint.weights))


async def find_loadable(services: Services, reader: TenantId, path: str) -> Source:
    """Do what `find_source` does; raises Invalid for files that are for download only."""
    source = await find_source(services, reader, path)
    check_loadable(source.checkpoint)
    return source


async def reader_of(
    request: Request, services: Services, tenant: TenantId, access_token: str | None
) -> TenantId:
    """Say as whom a path is read: as the tenant, or as the owner of the key that it shows for it.

    Raises:
        Invalid: no good key.
        TooManyFailures: and this address has shown too many of those.
    """
    if access_token is None:
        return tenant
    try:
        return (await identify(request, services, access_token)).id
    except (AuthenticationFailed, InvalidToken) as wrong:
        raise Invalid("weights_access_token is not a valid API key.") from wrong
