"""One line for those who wait: what for, for how long, and what the server says to that.

It appears on stderr once a wait has lasted for ten seconds, where stderr is a terminal or a notebook,
and is gone when the wait is over. Elsewhere the logger `cotrain` gets it, as INFO, once a minute.
COTRAIN_PROGRESS=0 turns it off.
"""

from __future__ import annotations

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
"""The thread that draws ends after so many rounds in which nothing was waited for."""
NOTEBOOK_COLUMNS = 120


class Wait(NamedTuple):
    """Something that a caller waits for."""

    since: float
    what: Callable[[], str]


class ServerMessage(NamedTuple):
    """What the server said last, and until when it is worth showing."""

    text: str
    until: float


def line(waits: list[Wait], word: ServerMessage | None, now: float) -> str | None:
    """Say what is waited for, the longest wait first; None while none of them is long."""
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
    """The one line of this process. Used from any thread."""

    def __init__(self) -> None:
        self._begin_anew()
        if hasattr(os, "register_at_fork"):  # what is forked has neither the waits nor the thread
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
        """Draw nothing until the block ends: something else has the terminal."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def show_message(self, text: str, for_s: float) -> None:
        """Show what the server says, for so long."""
        self._word = ServerMessage(text, time.monotonic() + for_s)

    def clear(self) -> None:
        """Take the line away, for one who prints."""
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
        """Draw the line as it is now, or log it."""
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
            # Blanks and not an escape: a notebook knows only the carriage return.
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
    """Width of a terminal or a notebook; 0 where stderr is neither."""
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
