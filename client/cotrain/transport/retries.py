"""Retry policy: which calls are retried, for how long, and how it is logged.

A lost response, a busy server (429), a restarting one (5xx) and a slow one (408) are retried; every
other rejection is raised to the caller. A response from an intermediary counts as a lost response, but only if the
server has responded before; otherwise the address is wrong. A server that has responded before gets minutes to
come back. One that never has is probably at another address, and gets seconds.
"""

import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cotrain.errors import APIConnectionError, APIError, APIStatusError, ForeignAnswer
from cotrain.transport.progress import PROGRESS

log = logging.getLogger("cotrain")

WARN_AFTER_S = 10.0
WARN_AGAIN_S = 600.0
"""Minimum interval between two log lines with the same reason."""
WORD_LASTS_S = 60.0
"""Display time of a server message: the longest time until a poll brings the next one."""


@dataclass(frozen=True)
class RetryPolicy:
    """Duration and delays of the retries of a call."""

    give_up_after_s: float = 300.0
    give_up_unanswered_after_s: float = 30.0
    """Limit for a server that has never responded."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0

    def delay_s(self, failures: int, error: APIError, jitter: float) -> float:
        """Return the delay in seconds after `failures` in a row; the server's `Retry-After` takes precedence.

        `jitter` in 0…1 shortens the wait by up to a quarter, so that many clients spread out.
        """
        if isinstance(error, APIStatusError) and error.retry_after_s is not None:
            return error.retry_after_s
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.longest_delay_s) * (1.0 - 0.25 * jitter)


def queue_state_reason(error: APIStatusError) -> str | None:
    """Return the server's reason why a request is still pending, or None."""
    reason = error.body.get("queue_state_reason") if isinstance(error.body, dict) else None
    return str(reason) if reason else None


def is_moving(error: APIStatusError) -> bool:
    """Return True if the server reports that the request's queue is progressing."""
    return isinstance(error.body, dict) and error.body.get("queue_state") == "active"


def is_transient(error: APIError) -> bool:
    """Return True if the same request may succeed later."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


@dataclass
class Contact:
    """Reachability of the server, from all calls of one client."""

    base_url: str
    is_known: bool = False
    """True if it has ever responded."""
    _silent_since: float | None = None
    _has_warned: bool = False
    _warned_at: dict[object, float] = field(default_factory=dict)

    def answered(self) -> None:
        """Record a response, whatever its content."""
        if self._silent_since is not None and self._has_warned:
            silence_s = time.monotonic() - self._silent_since
            log.info("%s answers again, after %.0f s", self.base_url, silence_s)
        self.is_known, self._silent_since, self._has_warned = True, None, False

    def lost(self, error: APIConnectionError, patience_s: float) -> None:
        """Record a missing response; warn once each time the server stops responding."""
        self._silent_since = self._silent_since or time.monotonic()
        PROGRESS.show_message(str(error), WORD_LASTS_S)
        if not self._has_warned and time.monotonic() - self._silent_since >= WARN_AFTER_S:
            self._has_warned = True
            PROGRESS.clear()
            log.warning("still trying, for %.0f s in all: %s", patience_s, error)

    def busy(self, error: APIStatusError, waited_s: float) -> None:
        """Record why the server delays a call; warn once if the wait is long."""
        why = queue_state_reason(error)
        PROGRESS.show_message(why or str(error), WORD_LASTS_S)
        # The message contains numbers that change: a position, seconds.
        about = re.sub(r"\d+", "", why) if why else error.status_code
        now = time.monotonic()
        if waited_s >= WARN_AFTER_S and now - self._warned_at.get(about, -WARN_AGAIN_S) >= WARN_AGAIN_S:
            self._warned_at[about] = now
            PROGRESS.clear()
            log.warning("still waiting, and trying again: %s", why or error)


@dataclass
class Patience:
    """Remaining retries of one call. Each failure in a row waits longer than the last."""

    policy: RetryPolicy
    contact: Contact
    sleep: Callable[[float], Awaitable[None]]
    _failures: int = 0
    _since: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """Reset the retries: the server has responded usefully."""
        self._failures, self._since = 0, time.monotonic()

    def pending(self, error: APIStatusError) -> None:
        """Reset the retries: the result is pending, and the server may have sent a reason.

        A position in a queue that moves is shown in the progress line. A queue that does not move is
        logged as a warning.
        """
        self.renew()
        reason = queue_state_reason(error)
        if reason and is_moving(error):
            PROGRESS.show_message(reason, WORD_LASTS_S)
        elif reason:
            self.contact.busy(error, time.monotonic() - self._began)

    async def wait_out(self, error: APIError) -> None:
        """Wait before the next attempt. Raises the error if it is final or the time limit has passed."""
        self._failures += 1
        tried_s = time.monotonic() - self._since
        if isinstance(error, APIConnectionError):
            self.contact.lost(error, self._limit_s(error))
        if not is_transient(error) or (isinstance(error, ForeignAnswer) and not self.contact.is_known):
            raise error
        if tried_s > self._limit_s(error):
            raise self._enough(error, tried_s)
        if isinstance(error, APIStatusError):
            self.contact.busy(error, tried_s)
        await self.sleep(self.policy.delay_s(self._failures, error, random.random()))  # noqa: S311  # no secret

    def _limit_s(self, error: APIError) -> float:
        if isinstance(error, APIConnectionError) and not self.contact.is_known:
            return min(self.policy.give_up_after_s, self.policy.give_up_unanswered_after_s)
        return self.policy.give_up_after_s

    def _enough(self, error: APIError, tried_s: float) -> APIError:
        if not isinstance(error, APIConnectionError):
            return error
        times = "once" if self._failures == 1 else f"{self._failures} times in {tried_s:.0f} s"
        hint = "" if self.contact.is_known else (
            f". Nothing has ever answered at {self.contact.base_url}: is a server running there,"
            " and is the base URL right?"
        )  # fmt: skip
        final = type(error)(f"{error} (tried {times}){hint}")
        final.__cause__ = error
        return final
