"""Exit of a process that cannot start, and that a restart would not help.

Every process does the same: a log line with a `reason`, which is a sentence for the operator, and its own exit status.
"""

import json
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import structlog
from pydantic import ValidationError

from cotrain_store.monitoring.tracing import TracingRefused, start_tracing
from cotrain_store.settings import PREFIX, StoreSettings

log = structlog.get_logger()

EXIT_CODE = 2

Settings = TypeVar("Settings", bound=StoreSettings)


def refuse(event: str, reason: str) -> NoReturn:
    """Log the reason why this process does not start, and exit."""
    log.error(event, reason=reason)
    sys.exit(EXIT_CODE)


def read_settings(kind: type[Settings]) -> Settings:
    """Return a process' settings; exit if one is invalid.

    Values are not quoted: some are secrets.
    """
    try:
        return kind()
    except ValidationError as error:
        refuse("settings_refused", _reason(error))


def _reason(error: ValidationError) -> str:
    """Return the first invalid setting and the errors of all its alternatives, for example of `auto` or a number."""
    wrong = error.errors()
    field = wrong[0]["loc"][:1]
    name = f"{PREFIX}{field[0]}: ".upper() if field else ""
    reasons = [each["msg"].removeprefix("Value error, ").rstrip(".") for each in wrong if each["loc"][:1] == field]
    return f"{name}{'; or: '.join(reasons)}."


def trace_or_refuse(process: str, instance: str, *, decides: bool = False) -> None:
    """Start to report spans if the environment configures it; exit if that is impossible."""
    try:
        start_tracing(process, instance, decides=decides)
    except TracingRefused as refused:
        refuse("tracing_refused", str(refused))


def last_reason(lines: Sequence[str]) -> str | None:
    """Return the newest `reason` in lines of a log, or None."""
    for line in reversed(lines):
        try:
            reason = json.loads(line).get("reason")
        except (ValueError, AttributeError):
            continue
        if isinstance(reason, str):
            return reason
    return None
