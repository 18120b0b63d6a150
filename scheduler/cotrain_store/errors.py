"""Errors of the store and of the HTTP API, and the table of all refusals.

A `Refused` is answered to the client with the status, code and message of its `Reason`. Subclasses exist only
for refusals that some code catches by type. The other errors concern processes, not clients.
"""

from enum import Enum

from typing_extensions import override


class Reason(Enum):
    """Table of refusals: HTTP status, default message, and seconds after which a retry may succeed.

    SDKs retry 408, 409, 429 and 5xx, pause for an hour at 402, and treat all others as final. Status 409 is not
    used, because the SDK repeats it silently for five minutes.
    """

    # fmt: off
    # Missing resources.
    SESSION_NOT_FOUND = 404, "Session not found."
    RUN_NOT_FOUND = 404, "Training run not found."
    TENANT_NOT_FOUND = 404, "Tenant not found."
    KEY_NOT_FOUND = 404, "API key not found."
    WORKER_NOT_FOUND = 404, "Worker not found."
    REQUEST_NOT_FOUND = 404, "Request not found."
    # The SDK samples again after 410.
    SAMPLE_EXPIRED = 410, "The result of this sample request has expired. Sample again."
    SAMPLER_NOT_FOUND = 404, "Sampler not found. A sampler of an unnamed save expires after 6 hours without use, or earlier if its tenant has many. Save under a name to keep the weights."
    CHECKPOINT_NOT_FOUND = 404, "Checkpoint not found."
    WEBHOOK_NOT_FOUND = 404, "No webhook is set. Set one with PUT /api/v1/webhook."
    WEIGHTS_DELETED = 404, "The weights of this checkpoint were deleted."
    CHECKPOINT_DAMAGED = 404, "The files of this checkpoint are damaged or cannot be verified."
    UPLOAD_NOT_FOUND = 404, "Upload not found, or expired. Start another with external_weights_upload_start."
    CYCLE_NOT_KEPT = 404, "Cycle not found. The last 1,000 cycles are kept."
    BASE_MODEL_NOT_SERVED = 400, "This base model is not served here."

    # Credentials and permissions.
    INVALID_KEY = 401, "Invalid API key."
    EXPIRED_KEY = 401, "The API key has expired."
    INVALID_TOKEN = 401, "The token is invalid or has expired. Get a new one with your API key."
    NOT_LOGGED_IN = 401, "Log in, or send an API key."
    BAD_LINK = 403, "The link is invalid or has expired."
    CROSS_SITE_FORM = 403, "Another site sent this form. Behind a proxy that changes the Host header, set COTRAIN_PUBLIC_URL."
    KEY_OF_THE_OPERATOR = 403, "This API key is in the server's settings. Only the operator can revoke it."
    READ_ONLY_KEY = 403, "This API key has the role viewer and can only read. The operator can create a key of a member."
    OPERATORS_ONLY = 404, "Not Found"  # as if the endpoint did not exist

    # The request is wrong.
    UNREADABLE = 400, "The request body cannot be read."
    INVALID = 400, "The request is not valid."
    BODY_TOO_LARGE = 413, "The request body exceeds the limit."
    BODY_TOO_SLOW = 408, "The request body did not arrive in time."
    UNSUPPORTED_MEDIA_TYPE = 415, "This endpoint does not accept this type of request body."
    SEQ_CONFLICT = 400, "seq_id was already used with different content."
    SEQ_TOO_FAR = 400, "seq_id is too far ahead."
    RUN_CLOSED = 400, "The training run was unloaded."
    RUN_FAILED = 400, "The training run was stopped because its recovery did not reproduce the stored results."
    # The SDK's heartbeat stops at 410. Training never receives a 410: a finished session's runs are
    # closed, and the SDK would send the same op again under a new seq_id.
    SESSION_FINISHED = 410, "The session has finished."
    RECORD_QUOTA_REACHED = 400, "The sessions and runs of this tenant, with their metadata, use the whole quota record_bytes. The operator can raise it in COTRAIN_QUOTAS."
    RUN_TOO_LARGE = 400, "A run of this rank exceeds the quota run_bytes of this tenant. The operator can raise it in COTRAIN_QUOTAS."
    MALFORMED_PATH = 400, "The checkpoint path is malformed. Use tinker://<run>/weights/<name>."
    KEY_IN_SETTINGS = 400, "This API key is in the server's settings and stays valid until it is removed there. Remove it from --api-key, COTRAIN_API_KEYS or the key file, and restart the server."
    CANNOT_MOVE = 400, "This run cannot be moved."

    # Quotas and limits: the same request can succeed later.
    QUEUE_FULL = 429, "The queue of this tenant is full. Retry later.", 5.0
    RUN_QUOTA_REACHED = 429, "This tenant has its maximum number of runs. Unload some.", 30.0
    RUN_BYTES_QUOTA_REACHED = 429, "The runs of this tenant use the whole quota run_bytes. Unload some.", 30.0
    SESSION_QUOTA_REACHED = 429, "This tenant has its maximum number of sessions. Finish some, or wait until idle ones end.", 30.0
    SAMPLER_QUOTA_REACHED = 429, "The samplers of this tenant use its whole quota. Unused samplers expire.", 30.0
    WEBHOOK_FULL = 429, "The event queue of this webhook is full. Retry later.", 30.0
    UNREAD_QUOTA_REACHED = 429, "The unread results of this tenant exceed the quota unread_bytes. Fetch them.", 5.0
    SAMPLING_BUSY = 429, "This tenant has its maximum number of pending sample requests. Retry later.", 1.0
    SAMPLE_TOKENS_QUEUED = 429, "The pending sample requests of this tenant use the whole quota sample_tokens. Retry later.", 1.0
    STORE_FULL = 429, "The server's memory for pending requests and unread results is full. Retry later.", 30.0
    TOO_MANY_FAILURES = 429, "Too many failed attempts from this address. Wait a minute.", 60.0
    TOO_MANY_POLLS = 429, "Too many requests of this tenant are waiting for results.", 1.0
    TOO_MANY_BODIES = 429, "Too many bytes of this tenant are in flight. Send fewer requests at once.", 1.0
    TOO_MANY_CONNECTIONS = 429, "This tenant has too many open requests. Send fewer at once.", 1.0
    TOO_MANY_UPLOADS = 429, "This tenant has too many uploads in flight. Retry later.", 5.0

    # The server cannot serve the request now.
    BASE_MODEL_STARTING = 503, "The first worker of this base model is still starting. Retry later.", 10.0
    DISK_RESERVE_REACHED = 503, "The server's disk is almost full. Requests continue once its operator has freed space.", 30.0
    STORE_UNAVAILABLE = 503, "Redis does not respond, or rejects writes. Retry later.", 1.0
    BODY_SWEPT = 503, "The request body expired before the request was accepted. Send it again.", 1.0
    SHUTTING_DOWN = 503, "This server process is shutting down. Send the request again.", 1.0
    # fmt: on

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """Machine-readable code in the response."""
        return self.name.lower()


class StoreError(Exception):
    """Base of all errors of the store. The docstring of a subclass is its default message."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class Refused(StoreError):
    """A refused request. `message` replaces the default message of its reason."""

    reason: Reason

    def __init__(self, reason: Reason, message: str = "") -> None:
        super().__init__(message or reason.message)
        self.reason = reason
        self.args = (reason, message or reason.message)  # as pickle passes them on

    @override
    def __str__(self) -> str:
        return str(self.args[-1])


class TypedRefusal(Refused):
    """Base of refusals that some code catches by type. A subclass sets `reason`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(self.reason, message)
        self.args = self.args[1:]


class RunNotFound(TypedRefusal):
    reason = Reason.RUN_NOT_FOUND


class RequestNotFound(TypedRefusal):
    reason = Reason.REQUEST_NOT_FOUND


class SampleExpired(RequestNotFound):
    reason = Reason.SAMPLE_EXPIRED


class SamplerNotFound(TypedRefusal):
    reason = Reason.SAMPLER_NOT_FOUND


class CheckpointNotFound(TypedRefusal):
    reason = Reason.CHECKPOINT_NOT_FOUND


class WeightsDeleted(TypedRefusal):
    reason = Reason.WEIGHTS_DELETED


class BaseModelNotServed(TypedRefusal):
    reason = Reason.BASE_MODEL_NOT_SERVED


class AuthenticationFailed(TypedRefusal):
    reason = Reason.INVALID_KEY


class InvalidKey(AuthenticationFailed):
    reason = Reason.INVALID_KEY


class ExpiredKey(AuthenticationFailed):
    reason = Reason.EXPIRED_KEY


class SeqConflict(TypedRefusal):
    reason = Reason.SEQ_CONFLICT


class RunClosed(TypedRefusal):
    reason = Reason.RUN_CLOSED


class MalformedPath(TypedRefusal):
    reason = Reason.MALFORMED_PATH


class KeyInSettings(TypedRefusal):
    reason = Reason.KEY_IN_SETTINGS


class StoreUnavailable(TypedRefusal):
    reason = Reason.STORE_UNAVAILABLE


class Fenced(StoreError):
    """A newer process holds this role."""


class PlanOutdated(StoreError):
    """The queue changed while this plan was made; plan again."""


class SpoolCorrupt(StoreError):
    """A spool record does not match its reference."""


class MalformedBody(StoreError):
    """The request body cannot be read."""


class UnsafeRedis(StoreError):
    """This Redis could lose acknowledged writes, or does not fit the data folder."""
