"""A process that cannot start, and that starting again would not help: it says why, and ends.

The same everywhere: a line of its log with a `reason`, which is a sentence for the operator, and an exit
status of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import structlog
from pydantic import ValidationError

from cotrain_store.monitoring.tracing import TracingRefused, start_tracing
from cotrain_store.settings.store import PREFIX, StoreSettings, removed_variables

log = structlog.get_logger()

EXIT_CODE = 2

Settings = TypeVar("Settings", bound=StoreSettings)


def refuse(event: str, reason: str) -> NoReturn:
    """Say why this process does not start, and end it."""
    log.error(event, reason=reason)
    sys.exit(EXIT_CODE)


def read_settings(kind: type[Settings]) -> Settings:
    """Read a process's settings; one that is wrong, or is none any more, ends it.

    Values are not quoted: some are secrets.
    """
    if removed := removed_variables():
        refuse("settings_refused", " ".join(removed))
    try:
        return kind()
    except ValidationError as error:
        refuse("settings_refused", _reason(error))


def _reason(error: ValidationError) -> str:
    """Name the first setting that is wrong, and all that it may be: of `auto` or a number, both."""
    wrong = error.errors()
    field = wrong[0]["loc"][:1]
    name = f"{PREFIX}{field[0]}: ".upper() if field else ""
    reasons = [
        each["msg"].removeprefix("Value error, ").rstrip(".")
        for each in wrong
        if each["loc"][:1] == field
    ]
    return f"{name}{'; or: '.join(reasons)}."


def trace_or_refuse(process: str, instance: str, *, decides: bool = False) -> None:
    """Report spans where the environment asks for that; where that cannot be, it ends the process."""
    try:
        start_tracing(process, instance, decides=decides)
    except TracingRefused as refused:
        refuse("tracing_refused", str(refused))


def last_reason(lines: Sequence[str]) -> str | None:
    """Find the newest `reason` in lines of a log; None if there is none."""
    for line in reversed(lines):
        try:
            reason = json.loads(line).get("reason")
        except (ValueError, AttributeError):
            continue
        if isinstance(reason, str):
            return reason
    return None
