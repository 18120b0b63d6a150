"""RestClient: runs, checkpoints, sessions, usage and webhook of an account. It opens no session."""

import json
import uuid
from base64 import urlsafe_b64decode
from collections.abc import Coroutine, Sequence
from datetime import date, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel
from typing_extensions import override

from cotrain.clients.checkpoints import archive_url, checkpoint_url
from cotrain.errors import MalformedMessage, RequestFailed
from cotrain.requests.connection import Connection, shared_connection
from cotrain.requests.futures import Future
from cotrain.settings import client_settings
from cotrain.transport.http import url_of
from cotrain.transport.responses import acknowledged, reader
from cotrain.wire.checkpoints import (
    CheckpointArchiveUrlResponse,
    CheckpointTtlRequest,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    WeightsInfoRequest,
    WeightsInfoResponse,
    WhoamiResponse,
)
from cotrain.wire.model import WireModel
from cotrain.wire.rest import (
    AccessScope,
    AssignProjectRequest,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    CheckpointsListResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
    TraceExportResponse,
    TrainingRun,
    TrainingRunHistory,
    TrainingRunsResponse,
    UpdateTrainingRunRequest,
    WaitReason,
)
from cotrain.wire.runs import LoraConfig, UnloadModelRequest, UntypedAPIFuture
from cotrain.wire.sampling import GetSamplerResponse
from cotrain.wire.sessions import AuthTokenResponse, GetServerCapabilitiesResponse
from cotrain.wire.usage import (
    AuditLogResponse,
    BillingUsageResponse,
    NewWebhook,
    SetWebhookRequest,
    StorageResponse,
    UsageResponse,
    Webhook,
    WebhookRemoved,
    WebhookTest,
)

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

#: Interval between requests for a timeline that the server is still drawing.
TRACE_POLL_S = 5.0
_EMPTY = WireModel()
"""Empty request body."""
AuditedResource = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class RestClient:
    """Client that lists and changes the resources of an account.

    It works from any thread or event loop and need not be closed. Every method sends its request at
    once and returns a `Future`: `.result()` blocks for the response, `await` returns it. Each method
    has an alias `…_async`, which is the same method.

    A rejected request raises APIStatusError (NotFoundError if the resource does not exist or belongs to
    another tenant). A malformed path raises ValueError. `service.create_rest_client()` makes a
    client that shares the connection of a ServiceClient. Created directly, it uses the same base URL and
    key defaults as ServiceClient. Times are UTC, sizes bytes, lists newest first.
    """

    def __init__(
        self, connection: Connection | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        connection = connection or shared_connection(client_settings(base_url, api_key))
        self._connection = connection
        self._loop = connection.loop
        self._transport = connection.transport

    @override
    def __repr__(self) -> str:
        return f"<RestClient of {self._connection!r}>"

    # ---- Server and key --------------------------------------------------------------------------

    def get_server_capabilities(self) -> Future[GetServerCapabilitiesResponse]:
        """Return the base models of the server."""
        return self._get("get_server_capabilities", GetServerCapabilitiesResponse)

    def whoami(self) -> Future[WhoamiResponse]:
        """Return the owner of the API key."""
        return self._start(self._whoami())

    # ---- Runs ------------------------------------------------------------------------------------

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        tags: Sequence[str] = (),
        text: str | None = None,
    ) -> Future[TrainingRunsResponse]:
        """Return one page of runs; `.cursor.total_count` is the length of the whole list.

        `tags` keeps runs that have all of these tags. `text` keeps runs with its words in note or tags.
        """
        return self._get(
            "training_runs",
            TrainingRunsResponse,
            limit=limit,
            offset=offset,
            access_scope=access_scope,
            project_id=project_id,
            tag=list(tags) or None,
            text=text,
        )

    def list_training_run_ids(self, limit: int = 20, offset: int = 0) -> Future[list[str]]:
        """Return the ids of one page of runs."""
        return self._start(self._run_ids(limit, offset))

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> Future[TrainingRun]:
        """Return one run; scope `accessible` includes other tenants' runs with a published checkpoint."""
        return self._get(url_of("training_runs", training_run_id), TrainingRun, access_scope=access_scope)

    def update_training_run(
        self, training_run_id: str, *, note: str | None = None, tags: Sequence[str] | None = None
    ) -> Future[TrainingRun]:
        """Update the note or the tags of a run, by which lists and searches find it; None keeps a field."""
        changes = UpdateTrainingRunRequest(note=note, tags=None if tags is None else list(tags))
        path = url_of("training_runs", training_run_id)
        return self._start(self._transport.patch(path, changes, reader(TrainingRun)))

    def end_training_run(self, training_run_id: str) -> Future[None]:
        """End a run from any client. Waiting requests fail, and it cannot continue."""
        return self._start(self._end(training_run_id))

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[TrainingRun]:
        """Return the run that saved a checkpoint."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self.get_training_run(parsed.training_run_id, access_scope)

    def get_training_run_history(self, training_run_id: str, after_step: int = -1) -> Future[TrainingRunHistory]:
        """Return losses, gradient norms and learning rates of a run, for steps after `after_step`."""
        path = url_of("training_runs", training_run_id, "history")
        return self._get(path, TrainingRunHistory, after_step=after_step)

    def get_wait_reason(self, training_run_id: str) -> Future[WaitReason]:
        """Return the cause for which a run waits: `.reason` is one sentence, `.cause` a word for programs."""
        return self._get(url_of("training_runs", training_run_id, "why"), WaitReason)

    # ---- Checkpoints -----------------------------------------------------------------------------

    def list_checkpoints(self, training_run_id: str) -> Future[CheckpointsListResponse]:
        """Return all checkpoints of one run."""
        return self._get(url_of("training_runs", training_run_id, "checkpoints"), CheckpointsListResponse)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> Future[CheckpointsListResponse]:
        """Return one page of the checkpoints of all runs."""
        return self._get("checkpoints", CheckpointsListResponse, limit=limit, offset=offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Future[WeightsInfoResponse]:
        """Return the base model and LoRA settings that a run needs to load a checkpoint."""
        return self._post("weights_info", WeightsInfoRequest(tinker_path=tinker_path), WeightsInfoResponse)

    def get_external_weights_urls(self, tinker_path: str) -> Future[ExternalWeightsUrlsResponse]:
        """Return a link to each file of a checkpoint; the links need no key and expire after minutes."""
        return self._get(f"{checkpoint_url(tinker_path)}/external_weights_urls", ExternalWeightsUrlsResponse)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> Future[CheckpointArchiveUrlResponse]:
        """Return a link to a tar of a checkpoint's files; `checkpoint_id` is `<kind>/<name>`."""
        return self.get_checkpoint_archive_url_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> Future[CheckpointArchiveUrlResponse]:
        """Return a link to a tar of a checkpoint's files."""
        return self._start(archive_url(self._transport, checkpoint_url(tinker_path)))

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Future[None]:
        """Delete a checkpoint; runs loaded from it keep their weights. `checkpoint_id` is `<kind>/<name>`."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Delete a checkpoint; runs loaded from it keep their weights."""
        return self._start(self._transport.delete(checkpoint_url(tinker_path)))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Publish a checkpoint: every tenant of the server may read it."""
        return self._start(self._transport.post(f"{checkpoint_url(tinker_path)}/publish", _EMPTY, acknowledged))

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Make a published checkpoint private again."""
        return self._start(self._transport.delete(f"{checkpoint_url(tinker_path)}/publish"))

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> Future[None]:
        """Set the expiry of a checkpoint, in seconds from now; None removes it."""
        path = f"{checkpoint_url(tinker_path)}/ttl"
        return self._start(self._transport.put(path, CheckpointTtlRequest(ttl_seconds=ttl_seconds), acknowledged))

    def copy_weights(
        self,
        path: str,
        destination_project_id: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> Future[str]:
        """Copy a checkpoint to a project and return the new path. The copy's run cannot be trained.

        Both copies share the stored bytes. `weights_access_token` is an API key of the tenant that owns
        the checkpoint, if that is another tenant.
        """
        request = CopyWeightsRequest(
            source_path=path,
            destination_project_id=destination_project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )
        return self._start(self._copy(request))

    def external_weights_upload_start(
        self, base_model: str, lora_config: LoraConfig, destination_project_id: str | None = None
    ) -> Future[ExternalWeightsUploadStartResponse]:
        """Start an upload of an adapter; returns a URL for each file, which expires in an hour.

        PUT each file to its URL, then call `external_weights_upload_finish`. `lora_config` must have
        the rank and the modules of the files; their alpha is that of adapter_config.json.
        """
        request = ExternalWeightsUploadStartRequest(
            base_model=base_model, lora_config=lora_config, destination_project_id=destination_project_id
        )
        return self._post("external_weights_upload_start", request, ExternalWeightsUploadStartResponse)

    def external_weights_upload_finish(self, upload_id: str) -> Future[ExternalWeightsUploadFinishResponse]:
        """Return the path of the uploaded checkpoint once it is stored. A repeat returns the same path.

        The future raises BadRequestError if a file is missing, malformed or does not fit.
        """
        request = ExternalWeightsUploadFinishRequest(upload_id=upload_id)
        return self._post("external_weights_upload_finish", request, ExternalWeightsUploadFinishResponse)

    # ---- Sessions and samplers -------------------------------------------------------------------

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[ListSessionsResponse]:
        """Return the ids of one page of sessions."""
        return self._get("sessions", ListSessionsResponse, limit=limit, offset=offset, access_scope=access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> Future[GetSessionResponse]:
        """Return the runs and samplers of a session."""
        return self._get(url_of("sessions", session_id), GetSessionResponse, access_scope=access_scope)

    def search_sessions(self, request: SessionSearchRequest) -> Future[SessionSearchResponse]:
        """Search sessions; pass `next_cursor` of a result as `cursor` to get its next page."""
        return self._post("sessions/search", request, SessionSearchResponse)

    def search_checkpoints(self, request: CheckpointSearchRequest) -> Future[CheckpointSearchResponse]:
        """Search your checkpoints; pass `next_cursor` of a result as `cursor` to get its next page."""
        return self._post("checkpoints/search", request, CheckpointSearchResponse)

    def assign_session_project(self, session_id: str, project_id: str) -> Future[None]:
        """Move a session to a project. A project is only a name and needs no creation."""
        path = url_of("sessions", session_id, "project")
        return self._start(self._transport.put(path, AssignProjectRequest(project_id=project_id), acknowledged))

    def export_session_trace(self, session_id: str) -> Future[str]:
        """Return a link to a session's timeline, for Perfetto or chrome://tracing.

        The future raises RequestFailed if the server has no cycles of the session any longer.
        """
        return self._start(self._trace_url(session_id))

    def get_sampler(self, sampler_id: str) -> Future[GetSamplerResponse]:
        """Return the base model and weights of a sampler."""
        return self._get(url_of("samplers", sampler_id), GetSamplerResponse)

    # ---- Usage and audit -------------------------------------------------------------------------

    def get_usage(
        self, starting_on: datetime | None = None, ending_before: datetime | None = None
    ) -> Future[UsageResponse]:
        """Return the usage of each run and sampler; without limits, of the server's whole record."""
        return self._get("usage", UsageResponse, starting_on=starting_on, ending_before=ending_before)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Return usage by hour and session, in the billing format of hosted services but without prices."""
        path = "billing/usage/events"
        return self._get(path, BillingUsageResponse, starting_on=starting_on, ending_before=ending_before)

    def get_current_checkpoint_storage_usage(self, project_id: str | None = None) -> Future[StorageResponse]:
        """Return the current checkpoint bytes of each project."""
        return self._get("billing/usage/checkpoints/current", StorageResponse, project_id=project_id)

    def get_audit_log(self, event_type: AuditedResource = "all", day: date | None = None) -> Future[AuditLogResponse]:
        """Return the audit log of one day (UTC; None means today), oldest first."""
        return self._get("audit", AuditLogResponse, event_type=event_type, day=day)

    # ---- Webhook ---------------------------------------------------------------------------------

    def set_webhook(self, url: str, drift_above: float | None = None) -> Future[NewWebhook]:
        """Set the URL that receives this account's events; returns the signing secret, only once.

        A pass with a mean rollout gap above `drift_above` nats causes an event `run.drift`.
        """
        request = SetWebhookRequest(url=url, drift_above=drift_above)
        return self._start(self._transport.put("webhook", request, reader(NewWebhook)))

    def get_webhook(self) -> Future[Webhook]:
        """Return the webhook's URL and the state of its deliveries."""
        return self._get("webhook", Webhook)

    def test_webhook(self) -> Future[WebhookTest]:
        """Send an event of type `test`."""
        return self._post("webhook/test", _EMPTY, WebhookTest)

    def remove_webhook(self) -> Future[None]:
        """Remove the webhook; no further events are sent."""
        return self._start(self._transport.delete("webhook", reader(WebhookRemoved)))

    # ---- Aliases with the names of the asynchronous API -------------------------------------------

    external_weights_upload_start_async = external_weights_upload_start
    external_weights_upload_finish_async = external_weights_upload_finish
    get_server_capabilities_async = get_server_capabilities
    whoami_async = whoami
    list_training_runs_async = list_training_runs
    list_training_run_ids_async = list_training_run_ids
    get_training_run_async = get_training_run
    update_training_run_async = update_training_run
    end_training_run_async = end_training_run
    get_training_run_history_async = get_training_run_history
    get_wait_reason_async = get_wait_reason
    get_training_run_by_tinker_path_async = get_training_run_by_tinker_path
    list_checkpoints_async = list_checkpoints
    list_user_checkpoints_async = list_user_checkpoints
    get_weights_info_by_tinker_path_async = get_weights_info_by_tinker_path
    get_external_weights_urls_async = get_external_weights_urls
    get_checkpoint_archive_url_async = get_checkpoint_archive_url
    get_checkpoint_archive_url_from_tinker_path_async = get_checkpoint_archive_url_from_tinker_path
    delete_checkpoint_async = delete_checkpoint
    delete_checkpoint_from_tinker_path_async = delete_checkpoint_from_tinker_path
    publish_checkpoint_from_tinker_path_async = publish_checkpoint_from_tinker_path
    unpublish_checkpoint_from_tinker_path_async = unpublish_checkpoint_from_tinker_path
    set_checkpoint_ttl_from_tinker_path_async = set_checkpoint_ttl_from_tinker_path
    copy_weights_async = copy_weights
    list_sessions_async = list_sessions
    get_session_async = get_session
    search_sessions_async = search_sessions
    assign_session_project_async = assign_session_project
    export_session_trace_async = export_session_trace
    get_sampler_async = get_sampler
    get_usage_async = get_usage
    get_billing_usage_async = get_billing_usage
    get_current_checkpoint_storage_usage_async = get_current_checkpoint_storage_usage
    get_audit_log_async = get_audit_log
    set_webhook_async = set_webhook
    get_webhook_async = get_webhook
    test_webhook_async = test_webhook
    remove_webhook_async = remove_webhook

    def _get(self, path: str, model: type[Model], **query: Any) -> Future[Model]:
        return self._start(self._fetch(path, model, **query))

    def _post(self, path: str, message: BaseModel, model: type[Model]) -> Future[Model]:
        return self._start(self._transport.post(path, message, reader(model)))

    def _start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        answer = self._loop.start(call)
        return Future(answer, answer, what=f"a call of {self!r}")

    async def _fetch(self, path: str, model: type[Model], **query: str | int | date | list[str] | None) -> Model:
        """GET a resource. Query parameters that are None are left out. Raises APIError."""
        sent = {
            name: value.isoformat() if isinstance(value, date) else value
            for name, value in query.items()
            if value is not None
        }
        return await self._transport.get(f"{path}?{urlencode(sent, doseq=True)}", reader(model))

    async def _whoami(self) -> WhoamiResponse:
        """Return the owner of the API key, from a token that the server issues for it."""
        token = await self._transport.post("auth/token", _EMPTY, reader(AuthTokenResponse))
        return _owner_of(token.jwt)

    async def _run_ids(self, limit: int, offset: int) -> list[str]:
        page = await self._fetch("training_runs", TrainingRunsResponse, limit=limit, offset=offset)
        return [run.training_run_id for run in page.training_runs]

    async def _end(self, run: str) -> None:
        await self._transport.post("unload_model", UnloadModelRequest(model_id=run), reader(UntypedAPIFuture))

    async def _copy(self, request: CopyWeightsRequest) -> str:
        """Copy a checkpoint. All attempts send the same idempotency key, so a retry makes no second copy."""
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        return (await self._transport.post("copy_weights", request, reader(CopyWeightsResponse), headers)).tinker_path

    async def _trace_url(self, session_id: str) -> str:
        """Poll until a session's timeline is drawn, and return its URL.

        Raises RequestFailed if the session has no timeline.
        """
        path = url_of("sessions", session_id, "trace_export")
        while (answer := await self._fetch(path, TraceExportResponse)).status == "pending":
            await self._transport.sleep(TRACE_POLL_S)
        if answer.url is None:
            raise RequestFailed(answer.error or "there is no timeline", session_id, "unknown")
        return answer.url


def _owner_of(jwt: str) -> WhoamiResponse:
    """Parse a token without verifying it: it comes directly from the server that issued it."""
    try:
        content = jwt.split(".")[1]
        claims = json.loads(urlsafe_b64decode(content + "=" * (-len(content) % 4)))
        org_urn = f"tml:organization:{claims['org_id']}"
        return WhoamiResponse(user_urn=claims["sub"], org_urn=org_urn, email=claims.get("email") or None)
    except (IndexError, KeyError, ValueError) as error:
        raise MalformedMessage("auth/token did not answer a token") from error
