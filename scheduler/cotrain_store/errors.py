"""Errors of the store. The docstring of a class is its default message.

StoreError
├── NotFound
│   ├── SessionNotFound
│   ├── RunNotFound
│   ├── RequestNotFound
│   │   └── SampleExpired
│   ├── SamplerNotFound
│   ├── CheckpointNotFound
│   ├── WeightsDeleted
│   ├── CheckpointDamaged
│   └── BaseModelNotServed
├── AuthenticationFailed
│   ├── InvalidKey
│   └── ExpiredKey
├── Refused                         (the request is wrong; it was not accepted)
│   ├── SeqConflict
│   ├── SeqTooFar
│   ├── RunClosed
│   ├── RunFailed
│   ├── SessionFinished
│   ├── RecordQuotaReached
│   ├── RunTooLarge
│   ├── MalformedPath
│   ├── KeyInSettings
│   └── CannotMove
├── Busy                            (nothing is wrong; try again later)
│   ├── QueueFull
│   ├── RunQuotaReached
│   ├── RunBytesQuotaReached
│   ├── SessionQuotaReached
│   ├── SamplerQuotaReached
│   ├── UnreadQuotaReached
│   ├── SamplingBusy
│   ├── StoreFull
│   ├── BaseModelStarting
│   └── DiskReserveReached
├── Fenced                          (this process was replaced by a newer one and may write nothing)
├── PlanOutdated
├── SpoolCorrupt
├── MalformedBody
├── UnsafeRedis
│   └── ForeignFolder               (belongs to another Redis)
└── StoreUnavailable
    └── BodySwept                   (its process stood still for too long)
"""

from __future__ import annotations


class StoreError(Exception):
    """The store could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class NotFound(StoreError):
    """Not found."""


class SessionNotFound(NotFound):
    """Session not found."""


class RunNotFound(NotFound):
    """Training run not found."""


class TenantNotFound(NotFound):
    """Tenant not found."""


class KeyNotFound(NotFound):
    """API key not found."""


class WorkerNotFound(NotFound):
    """Worker not found."""


class RequestNotFound(NotFound):
    """Request not found."""


class SampleExpired(RequestNotFound):
    """The result of this sample request has expired; sample again."""


class SamplerNotFound(NotFound):
    """Sampler not found. One made by a save without a name goes after 6 hours without use, or sooner where its tenant has many: save under a name to keep the weights."""


class CheckpointNotFound(NotFound):
    """Checkpoint not found."""


class WebhookNotFound(NotFound):
    """There is no webhook: PUT /api/v1/webhook sets one."""


class WeightsDeleted(NotFound):
    """The weights of this checkpoint no longer exist: it was deleted."""


class CheckpointDamaged(NotFound):
    """The files of this checkpoint are damaged, or cannot be checked."""


class BaseModelNotServed(NotFound):
    """This base model is not served here."""


class AuthenticationFailed(StoreError):
    """Authentication failed."""


class InvalidKey(AuthenticationFailed):
    """Invalid API key."""


class ExpiredKey(AuthenticationFailed):
    """API key expired."""


class Refused(StoreError):
    """The request was refused."""


class SeqConflict(Refused):
    """This seq_id was already used with different content."""


class SeqTooFar(Refused):
    """seq_id too far ahead."""


class RunClosed(Refused):
    """The training run was unloaded."""


class RunFailed(Refused):
    """The training run was stopped: its recovery did not reproduce the stored results."""


class SessionFinished(Refused):
    """The session has finished."""


class RecordQuotaReached(Refused):
    """This tenant has as many sessions and runs, with their metadata, as are kept; the operator can raise record_bytes of COTRAIN_QUOTAS."""


class RunTooLarge(Refused):
    """A run of this rank holds more than this tenant's runs may hold; the operator can raise run_bytes of COTRAIN_QUOTAS."""


class MalformedPath(Refused):
    """Malformed checkpoint path; one looks like tinker://<run>/weights/<name>."""


class KeyInSettings(Refused):
    """This API key stands in the server's settings: take it out of --api-key, COTRAIN_API_KEYS or the key file there, and restart the server. Until then it stays good."""


class CannotMove(Refused):
    """This run can not be moved."""


class Busy(StoreError):
    """The server is busy; try again."""

    retry_after_s: float = 1.0


class QueueFull(Busy):
    """Tenant queue is full."""

    retry_after_s = 5.0


class RunQuotaReached(Busy):
    """Run quota reached."""

    retry_after_s = 30.0


class RunBytesQuotaReached(Busy):
    """The runs of this tenant hold as much as they may; unload those that are done with."""

    retry_after_s = 30.0


class SessionQuotaReached(Busy):
    """Session quota reached; finish some, or let those that are idle end."""

    retry_after_s = 30.0


class SamplerQuotaReached(Busy):
    """Sampler quota reached; those without use expire."""

    retry_after_s = 30.0


class WebhookFull(Busy):
    """As many events wait for this webhook as are kept."""

    retry_after_s = 30.0


class UnreadQuotaReached(Busy):
    """Unread results exceed the quota; fetch them."""

    retry_after_s = 5.0


class SamplingBusy(Busy):
    """As many sample requests of this tenant are waiting as may wait."""

    retry_after_s = 1.0


class SampleTokensQueued(Busy):
    """The sample requests of this tenant that wait or run may come to as many tokens as are allowed: the quota sample_tokens."""

    retry_after_s = 1.0


class StoreFull(Busy):
    """The server holds as many waiting requests and unread results as its memory allows."""

    retry_after_s = 30.0


class BaseModelStarting(Busy):
    """The first worker of this base model is starting; until it is there, nothing is known of the model."""

    retry_after_s = 10.0


class DiskReserveReached(Busy):
    """The server's disk is almost full."""

    retry_after_s = 30.0


class Fenced(StoreError):
    """A newer process holds this role."""


class PlanOutdated(StoreError):
    """The queue changed while this plan was made; plan again."""


class SpoolCorrupt(StoreError):
    """A spool record does not match its reference."""


class MalformedBody(StoreError):
    """The request body cannot be read."""


class UnsafeRedis(StoreError):
    """This Redis could lose acknowledged writes."""


class ForeignFolder(UnsafeRedis):
    """The data folder belongs to another Redis."""


class UnusableBlobs(UnsafeRedis):
    """The object store refuses: it has no such bucket, or takes other credentials."""


class StoreUnavailable(StoreError):
    """Redis does not answer, or takes nothing for now."""


class BodySwept(StoreUnavailable):
    """This request was held up for so long that its body was removed. Send it again."""
