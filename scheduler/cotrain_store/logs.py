"""One JSON object per line, the same fields in every process; never a key, a token or a prompt."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from structlog.typing import WrappedLogger

#: Anything that looks like an API key, wherever it got into an event.
_KEY = re.compile(r"\b(?:tml|sk)-[A-Za-z0-9_.-]+")


def configure_logs(process: str, level: str = "info") -> None:
    """Send events to stderr as JSON lines that carry the process name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
            _without_keys,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def _without_keys(_: WrappedLogger, __: str, line: Any) -> str:
    """Mask keys in the finished line: a key may be in any field, at any depth."""
    return _KEY.sub("[key]", line)
