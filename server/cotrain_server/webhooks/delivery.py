"""Delivery of all tenants' webhook events: by one process at a time, one event at a time per tenant.

An API process delivers, because the scheduler must not wait for external hosts. If it crashes, any other API process
takes over. A slow receiver delays only its own tenant's events.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from cotrain_server.webhooks.sender import Sender, Undelivered
from cotrain_store.errors import Fenced
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST, stop_tasks
from cotrain_store.tenants.webhooks import DueEvent, Outcome, Webhooks

log = structlog.get_logger()

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 3600.0
GIVEN_UP_AFTER_S = 24 * 3600.0
POLL_S = 1.0
#: Tenants with concurrent deliveries. Others wait until one of these completes, at most 10 s.
AT_ONCE = 256
#: Minimum interval between two log lines about failed polls, whose cause may last.
POLL_FAILURE_LOG_S = 60.0
#: Pause of a tenant's events after an attempt whose outcome could not be recorded. The attempt does not count, and its
#: event is still due.
UNRECORDED_PAUSE_S = 300.0


def retry_in(attempts: int, age_s: float) -> float | None:
    """Return the delay before the next attempt: 5 s, 10 s, 20 s, … 1 h. None: give up."""
    wait_s: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts - 1, 20))
    return wait_s if age_s + wait_s <= GIVEN_UP_AFTER_S else None


class Delivery:
    """Delivery of due events while this process has the lease."""

    def __init__(self, webhooks: Webhooks, sender: Sender, poll_s: float = POLL_S) -> None:
        self._webhooks = webhooks
        self._sender = sender
        self._poll_s = poll_s
        self._sending: dict[TenantId, asyncio.Task[None]] = {}
        self._pause_end: dict[TenantId, float] = {}
        self._log_failure_at = 0.0

    async def run(self) -> None:
        """Poll for due events until cancelled. Pauses while Redis is unavailable."""
        try:
            while True:
                try:
                    if await self._webhooks.lead():
                        await self._deliver_due()
                except (*CONNECTION_LOST, Fenced):
                    pass  # another process delivers now, or the next poll detects it
                # One failed poll must not stop all tenants' events until a restart.
                except Exception:
                    if time.monotonic() >= self._log_failure_at:
                        log.exception("webhooks_unread")
                        self._log_failure_at = time.monotonic() + POLL_FAILURE_LOG_S
                await asyncio.sleep(self._poll_s)
        finally:
            await stop_tasks(list(self._sending.values()))

    async def _deliver_due(self) -> None:
        now = time.monotonic()
        self._pause_end = {tenant: end for tenant, end in self._pause_end.items() if end > now}
        count = AT_ONCE + len(self._sending) + len(self._pause_end)
        for event in await self._webhooks.due(count):
            if len(self._sending) >= AT_ONCE:
                return
            if event.tenant not in self._sending and event.tenant not in self._pause_end:
                self._sending[event.tenant] = asyncio.create_task(self._send_all(event))

    async def _send_all(self, first: DueEvent) -> None:
        """Send a tenant's due events sequentially until one fails."""
        event: DueEvent | None = first
        try:
            while event and await self._send(event):
                event = await self._webhooks.due_of(event.tenant)
        except (*CONNECTION_LOST, Fenced):
            return  # the event is sent again: at-least-once delivery
        except Exception:
            self._pause_end[first.tenant] = time.monotonic() + UNRECORDED_PAUSE_S
            log.exception("webhook_not_noted", tenant=first.tenant, retry_in_s=UNRECORDED_PAUSE_S)
        finally:
            del self._sending[first.tenant]

    async def _send(self, event: DueEvent) -> bool:
        """Make one attempt and record the outcome. Return False if it failed."""
        try:
            answer = await self._sender.send(event, int(time.time()))
        except Undelivered as failed:
            reason = str(failed)
        # Counts as an attempt, otherwise it would repeat every second without end.
        except Exception:
            log.exception("webhook_failed", tenant=event.tenant, event_id=event.id)
            reason = "The server failed while it sent this; its log says how."
        else:
            await self._record(event, Outcome.DELIVERED, answer)
            return True
        wait_s = retry_in(event.attempts + 1, event.age_s)
        outcome = Outcome.GIVEN_UP if wait_s is None else Outcome.RETRIED
        await self._record(event, outcome, reason, wait_s or 0.0)
        return False

    async def _record(self, event: DueEvent, outcome: Outcome, answer: str, retry_in_s: float = 0.0) -> None:
        await self._webhooks.tried(event, outcome, answer, retry_in_s)
        metrics.WEBHOOK_DELIVERIES.labels(outcome).inc()
        if outcome is Outcome.GIVEN_UP:
            log.warning("webhook_given_up", tenant=event.tenant, event_id=event.id, reason=answer)


@asynccontextmanager
async def delivering(webhooks: Webhooks, sender: Sender) -> AsyncIterator[None]:
    """Deliver events within the block."""
    task = asyncio.create_task(Delivery(webhooks, sender).run())
    try:
        yield
    finally:
        await stop_tasks([task])
        sender.close()
