"""Logs of a process: one JSON object per line, time first, the same fields in every process, without keys or prompts.

Lines of libraries, warnings and uncaught exceptions have the same format.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger
from typing_extensions import override

#: Any text in an event that looks like an API key.
_KEY = re.compile(r"\b(?:tml|sk)-[A-Za-z0-9_.-]+")
#: Limit of one line, because log collectors cut lines at 16 KB.
REQUESTS_PER_LINE = 100
_FIRST = ("ts", "level", "process", "event")

log = structlog.get_logger()


def start_logs(process: str, level: str = "info") -> None:
    """Write all output of this process to stderr as JSON lines; called before anything else."""
    configure_logs(process, level)
    _take_over_loggers()
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_crash
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread


def configure_logs(process: str, level: str = "info") -> None:
    """Write the project's own events to stderr as JSON lines with the process name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            _in_order(process),
            structlog.processors.JSONRenderer(),
            _without_keys,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Unfailing(sys.stderr)),  # type: ignore[arg-type]  # all it calls is write and flush
        cache_logger_on_first_use=True,
    )


def log_requests(
    write: Callable[..., Any], event: str, requests: Sequence[str], *, cycle: int, **fields: object
) -> None:
    """Log a cycle with all its requests' ids; a large cycle gets additional lines.

    `write` is a logger's method of the intended level.
    """
    write(event, cycle=cycle, **fields, requests=list(requests[:REQUESTS_PER_LINE]))
    for first in range(REQUESTS_PER_LINE, len(requests), REQUESTS_PER_LINE):
        more = list(requests[first : first + REQUESTS_PER_LINE])
        write("cycle_requests", cycle=cycle, of=event, requests=more)


def looks_like_key(text: str) -> bool:
    """Return True if a text contains a key that the log would mask."""
    return _KEY.search(text) is not None


class _Unfailing:
    """A stream whose errors, such as a full disk, do not reach the caller."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line; drop it on an error, because there is no other output."""
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush."""
        with suppress(OSError):
            self._stream.flush()


class _AsEvent(logging.Handler):
    """Handler that forwards log records of libraries to this log."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # any error of a library's arguments: the template is still useful
            text = str(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        log.log(level, text, logger=record.name, exc_info=record.exc_info or None)


def _take_over_loggers() -> None:
    """Send libraries' warnings and errors to this log only; some libraries have their own handlers."""
    logging.basicConfig(level=logging.WARNING, handlers=[_AsEvent()], force=True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # otherwise a placeholder for a parent name
            logger.handlers.clear()
            logger.propagate = True


def _in_order(process: str) -> Processor:
    def ordered(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["process"] = process
        return {name: event.pop(name) for name in _FIRST} | dict(event)

    return ordered


def _without_keys(_: WrappedLogger, __: str, line: Any) -> str:
    """Mask keys in the finished line: a key may be in any field, at any depth."""
    return _KEY.sub("[key]", line)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("crashed", exc_info=(kind, error, trace))


def _log_thread(crash: threading.ExceptHookArgs) -> None:
    name = crash.thread.name if crash.thread else ""
    log.critical("thread_crashed", thread=name, exc_info=(crash.exc_type, crash.exc_value, crash.exc_traceback))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    log.error("exception_ignored", where=found.err_msg, exc_info=(found.exc_type, found.exc_value, found.exc_traceback))
