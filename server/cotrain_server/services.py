"""Shared services of all requests: the store's components, opened once per process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any

import structlog

from cotrain_server.limits import MAX_UPLOADS, TenantSlots, TenantUse, WrongKeyCounter, body_memory, tenant_requests
from cotrain_server.parser import Parser
from cotrain_server.settings import ServerSettings
from cotrain_server.signed_tokens import Signer
from cotrain_store.disk.spool import new_writer
from cotrain_store.errors import Reason
from cotrain_store.monitoring.failures import Refusals
from cotrain_store.oplog.joint_intake import JointIntake
from cotrain_store.redis_client.connection import Connection, open_batching_connection
from cotrain_store.results.completions import Completions
from cotrain_store.results.futures import Futures
from cotrain_store.sampling.intake import SampleIntake
from cotrain_store.sampling.token_stream import TokenStream
from cotrain_store.tenants.api_keys import Tenants, signing_keys
from cotrain_store.tenants.audit_log import Audit
from cotrain_store.tenants.catalog import Catalog
from cotrain_store.tenants.checkpoints import Checkpoints
from cotrain_store.tenants.policies import PauseRecords, Policies
from cotrain_store.tenants.quotas import CachedQuotas
from cotrain_store.tenants.records import Records
from cotrain_store.tenants.run_labels import RunLabels
from cotrain_store.tenants.run_list import RunList
from cotrain_store.tenants.session_search import SessionSearch
from cotrain_store.tenants.webhooks import Webhooks
from cotrain_store.usage import Usage

log = structlog.get_logger()

#: Maximum wait of a poll in seconds. An SDK's socket times out after 45 s, proxies often after 60 s.
LONG_POLL_S = 25.0
#: Concurrent downloads of one tenant in one process. Further ones wait.
DOWNLOADS_PER_TENANT = 32


@dataclass
class Services:
    """Store access and drain state of one API process."""

    settings: ServerSettings
    long_poll_s: float
    admin_key: str = field(repr=False)
    connection: Connection
    tenants: Tenants
    policies: Policies
    pauses: PauseRecords
    quotas: CachedQuotas
    records: Records
    checkpoints: Checkpoints
    intake: JointIntake
    sample_intake: SampleIntake
    futures: Futures
    completions: Completions
    token_stream: TokenStream
    signer: Signer
    catalog: Catalog
    run_list: RunList
    session_search: SessionSearch
    usage: Usage
    audit: Audit
    webhooks: Webhooks
    run_labels: RunLabels
    refusals: Refusals
    wrong_keys: WrongKeyCounter = field(default_factory=WrongKeyCounter)
    polls_by_tenant: TenantUse = field(default_factory=partial(TenantUse, Reason.TOO_MANY_POLLS))
    body_memory: TenantUse = field(default_factory=body_memory)
    tenant_requests: TenantUse = field(default_factory=tenant_requests)
    parser: Parser = field(default_factory=Parser)
    scans: TenantSlots = field(default_factory=TenantSlots)
    """One slot per tenant for requests that send many sequential commands to Redis."""
    uploads: TenantUse = field(default_factory=partial(TenantUse, Reason.TOO_MANY_UPLOADS, MAX_UPLOADS))
    unpacking: asyncio.Lock = field(default_factory=asyncio.Lock)
    downloads: TenantSlots = field(default_factory=lambda: TenantSlots(DOWNLOADS_PER_TENANT))
    """Slots for files being sent, because bytes that are read and not yet sent occupy memory."""
    draining: bool = False
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task, for callers that are being cancelled and cannot await."""
        task = asyncio.create_task(work)
        self._background.add(task)  # the event loop holds only a weak reference
        task.add_done_callback(self._background.discard)

    def drain(self) -> None:
        """Report draining in `/readyz`, and answer every open poll now, so that its client asks the next process."""
        self.draining = True
        self.futures.release_all()
        self.completions.release_all()


async def _set_chosen_keys(tenants: Tenants, settings: ServerSettings) -> None:
    for key in await tenants.set_chosen_keys(settings.chosen_keys):
        log.warning(
            "key_left_settings",
            key=key.id,
            name=key.name,
            tenant=key.tenant,
            hint="it opens nothing now; `cotrain keys create NAME --tenant` makes its tenant another one",
        )


@asynccontextmanager
async def open_services(settings: ServerSettings, long_poll_s: float = LONG_POLL_S) -> AsyncIterator[Services]:
    """Open all services, register the keys of the settings, and close everything at the end.

    Raises:
        InvalidKey, OSError, ValueError: a key of the settings or of a file is invalid.
    """
    connection = open_batching_connection(settings.redis_url)
    # The first process creates the spool, and its thread must end with this process.
    spool = await asyncio.to_thread(settings.open_spool, new_writer("api"))
    try:
        tenants = Tenants(connection)
        await _set_chosen_keys(tenants, settings)
        reserve_bytes = settings.disk_reserve_bytes
        policies = Policies(connection)
        quotas = CachedQuotas(policies, settings.quotas)
        records = Records(connection, quotas.of, settings.base_models)
        checkpoints = Checkpoints(connection)
        async with (
            Futures(connection, spool, settings.gap_limit_s) as futures,
            Completions(connection) as completions,
            TokenStream(connection) as token_stream,
        ):
            services = Services(
                settings=settings,
                long_poll_s=long_poll_s,
                admin_key=await asyncio.to_thread(settings.read_admin_key),
                connection=connection,
                tenants=tenants,
                policies=policies,
                pauses=PauseRecords(connection),
                quotas=quotas,
                records=records,
                checkpoints=checkpoints,
                intake=JointIntake(connection, spool, quotas.of, reserve_bytes),
                sample_intake=SampleIntake(connection, spool, quotas.of, reserve_bytes),
                futures=futures,
                completions=completions,
                token_stream=token_stream,
                signer=Signer(await signing_keys(connection)),
                run_list=RunList(connection),
                catalog=Catalog(connection, records, checkpoints),
                session_search=SessionSearch(connection, checkpoints),
                usage=Usage(connection),
                audit=Audit(connection),
                run_labels=RunLabels(connection),
                refusals=Refusals(connection),
                webhooks=Webhooks(connection, f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"),
            )
            try:
                yield services
            finally:
                services.parser.close()
    finally:
        await asyncio.to_thread(spool.close)
        await connection.aclose()
