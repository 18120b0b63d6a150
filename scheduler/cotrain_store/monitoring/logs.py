"""One JSON object per line, time first, the same fields in every process; never a key, a token or a prompt.

So are lines of libraries, warnings and exceptions that nothing caught.
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

#: Anything that looks like an API key, wherever it got into an event.
_KEY = re.compile(r"\b(?:tml|sk)-[A-Za-z0-9_.-]+")
#: Of one line: what collects logs cuts lines at 16 KB.
REQUESTS_PER_LINE = 100
_FIRST = ("ts", "level", "process", "event")

log = structlog.get_logger()


def start_logs(process: str, level: str = "info") -> None:
    """Make all that this process says a JSON line on stderr; to be called before anything else."""
    configure_logs(process, level)
    _take_over_loggers()
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_crash
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread


def configure_logs(process: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send our own events to `stream` (stderr) as JSON lines that carry the process name."""
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
        logger_factory=structlog.PrintLoggerFactory(_Unfailing(stream or sys.stderr)),  # type: ignore[arg-type]  # all it calls is write and flush
        cache_logger_on_first_use=True,
    )


def log_requests(
    write: Callable[..., Any], event: str, requests: Sequence[str], *, cycle: int, **fields: object
) -> None:
    """Write down a cycle with its requests' ids, in full; those of a large one on lines of their own.

    `write` is a logger's method of the level they have.
    """
    write(event, cycle=cycle, **fields, requests=list(requests[:REQUESTS_PER_LINE]))
    for first in range(REQUESTS_PER_LINE, len(requests), REQUESTS_PER_LINE):
        more = list(requests[first : first + REQUESTS_PER_LINE])
        write("cycle_requests", cycle=cycle, of=event, requests=more)


def looks_like_key(text: str) -> bool:
    """Tell whether some text holds what a line of the log would not show."""
    return _KEY.search(text) is not None


class _Unfailing:
    """A stream whose trouble, a full disk for one, does not become that of who logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line, or lose it: there is no other place to say so."""
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush."""
        with suppress(OSError):
            self._stream.flush()


class _AsEvent(logging.Handler):
    """Gives what libraries log to our own log."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # of a library's own making: its template still says something
            text = str(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        log.log(level, text, logger=record.name, exc_info=record.exc_info or None)


def _take_over_loggers() -> None:
    """Have libraries' warnings and errors go to our log only; some bring handlers of their own."""
    logging.basicConfig(level=logging.WARNING, handlers=[_AsEvent()], force=True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # else a name that only others begin with
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


def _log_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    log.critical("crashed", exc_info=(kind, error, trace))


def _log_thread(crash: threading.ExceptHookArgs) -> None:
    name = crash.thread.name if crash.thread else ""
    log.critical(
        "thread_crashed", thread=name,
        exc_info=(crash.exc_type, crash.exc_value, crash.exc_traceback),
    )  # fmt: skip


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    log.error(
        "exception_ignored", where=found.err_msg,
        exc_info=(found.exc_type, found.exc_value, found.exc_traceback),
    )  # fmt: skip
