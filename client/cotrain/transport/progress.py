"""Progress line of waiting calls: the request, the duration, and the server's message.

It appears on stderr after a wait of ten seconds, if stderr is a terminal or a notebook, and disappears when
the wait ends. Otherwise it is logged to the logger `cotrain` as INFO, once a minute.
COTRAIN_PROGRESS=0 turns it off.
"""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

log = logging.getLogger("cotrain")

SHOWN_AFTER_S = 10.0
DRAWN_EVERY_S = 1.0
LOGGED_EVERY_S = 60.0
IDLE_ROUNDS = 60
"""The drawing thread ends after this many rounds in a row without a wait."""
NOTEBOOK_COLUMNS = 120


class Wait(NamedTuple):
    """A wait of a caller."""

    since: float
    what: Callable[[], str]


class ServerMessage(NamedTuple):
    """Last message of the server, and the time until which it is shown."""

    text: str
    until: float


def line(waits: list[Wait], word: ServerMessage | None, now: float) -> str | None:
    """Return the text of the line, with the longest wait; None while no wait is long."""
    late = [wait for wait in waits if now - wait.since >= SHOWN_AFTER_S]
    if not late:
        return None
    text = f"waiting {_duration(now - late[0].since)} for {late[0].what()}"
    if len(waits) > 1:
        text += f" and {len(waits) - 1} more"
    if word is not None and now < word.until:
        text += f" · {word.text}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class Progress:
    """Progress line of this process. Used from any thread."""

    def __init__(self) -> None:
        self._begin_anew()
        if hasattr(os, "register_at_fork"):  # a forked process has neither the waits nor the thread
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._waits: dict[object, Wait] = {}
        self._word: ServerMessage | None = None
        self._starting, self._drawing = threading.Lock(), threading.Lock()
        self._drawn = ""
        self._logged_at = -LOGGED_EVERY_S
        self._hidden = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Count as waiting for `what()` until the block ends."""
        if not _is_wanted():
            yield
            return
        me = object()
        self._waits[me] = Wait(time.monotonic(), what)
        self._begin()
        try:
            yield
        finally:
            self._waits.pop(me, None)
            if self._drawn and not self._waits:
                self.clear()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Draw nothing until the block ends, because other output uses the terminal."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def show_message(self, text: str, for_s: float) -> None:
        """Show a message of the server for `for_s` seconds."""
        self._word = ServerMessage(text, time.monotonic() + for_s)

    def clear(self) -> None:
        """Clear the progress line before other output."""
        with self._drawing:
            self._draw("")

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cotrain-progress", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(DRAWN_EVERY_S)
            idle = 0 if self._waits else idle + 1
            with self._starting:
                if idle >= IDLE_ROUNDS and not self._waits:
                    self._thread = None
                    return
            self.show()

    def show(self) -> None:
        """Draw the current line, or log it."""
        with self._drawing:
            now = time.monotonic()
            text = line(list(self._waits.values()), self._word, now)
            if _columns() and not self._hidden:
                self._draw(f"cotrain: {text}" if text else "")
            elif text and now - self._logged_at >= LOGGED_EVERY_S:
                self._logged_at = now
                log.info("%s", text)

    def _draw(self, text: str) -> None:
        text = text[: max(_columns() - 1, 0)]
        if text or self._drawn:
            # Spaces instead of an escape sequence, because a notebook supports only the carriage return.
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"\r{text.ljust(len(self._drawn))}" + ("" if text else "\r"))
                sys.stderr.flush()
        self._drawn = text


PROGRESS = Progress()


def _is_wanted() -> bool:
    if os.environ.get("COTRAIN_PROGRESS", "").lower() in ("0", "off", "no", "false"):
        return False
    return bool(_columns()) or log.isEnabledFor(logging.INFO)


def _columns() -> int:
    """Return the width of a terminal or a notebook; 0 if stderr is neither."""
    if sys.stderr is None:
        return 0
    if type(sys.stderr).__module__.startswith("ipykernel"):
        return NOTEBOOK_COLUMNS
    with suppress(OSError, ValueError):  # it is closed
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            return shutil.get_terminal_size().columns
    return 0


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
