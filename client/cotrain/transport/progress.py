"""Progress line of waiting calls: the request, the duration, and the server's message.

It appears after a wait of ten seconds, and disappears when the wait ends. It is a line on stderr if that is a terminal,
or one output of a notebook's cell, which is updated in place. Otherwise it is logged to the logger `cotrain` as INFO, once a minute.
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
from importlib import import_module
from typing import Any, NamedTuple

log = logging.getLogger("cotrain")

SHOWN_AFTER_S = 10.0
DRAWN_EVERY_S = 1.0
LOGGED_EVERY_S = 60.0


class Wait(NamedTuple):
    """A wait of a caller."""

    since: float
    what: Callable[[], str]


class ServerMessage(NamedTuple):
    """Last message of the server, and the time until which it is shown."""

    text: str
    until: float


def line(waits: list[Wait], message: ServerMessage | None, now: float) -> str | None:
    """Return the text of the line, with the longest wait; None while no wait is long."""
    late = [wait for wait in waits if now - wait.since >= SHOWN_AFTER_S]
    if not late:
        return None
    text = f"waiting {_duration(now - late[0].since)} for {late[0].what()}"
    if len(waits) > 1:
        text += f" and {len(waits) - 1} more"
    if message is not None and now < message.until:
        text += f" · {message.text}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class Progress:
    """Progress line of this process. Used from any thread."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):  # a forked process has neither the waits nor the thread
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._waits: dict[object, Wait] = {}
        self._message: ServerMessage | None = None
        self._starting, self._drawing = threading.Lock(), threading.Lock()
        self._drawn = ""
        self._output = CellOutput()
        self._logged_at = -LOGGED_EVERY_S
        self._hidden = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Count as waiting for `what()` until the block ends."""
        if not _is_enabled():
            yield
            return
        me = object()
        self._waits[me] = Wait(time.monotonic(), what)
        self._start_drawing()
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
        self._message = ServerMessage(text, time.monotonic() + for_s)

    def clear(self) -> None:
        """Clear the progress line before other output."""
        with self._drawing:
            self._draw("")

    def _start_drawing(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cotrain-progress", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(DRAWN_EVERY_S)
            with self._starting:
                if not self._waits:
                    self._thread = None
                    return
            self.show()

    def show(self) -> None:
        """Draw the current line, or log it."""
        with self._drawing:
            now = time.monotonic()
            text = line(list(self._waits.values()), self._message, now)
            if (_is_notebook() or _columns()) and not self._hidden:
                self._draw(f"cotrain: {text}" if text else "")
            elif text and now - self._logged_at >= LOGGED_EVERY_S:
                self._logged_at = now
                log.info("%s", text)

    def _draw(self, text: str) -> None:
        if _is_notebook():
            if text != self._drawn:
                self._output.show(text)
            self._drawn = text
            return
        text = text[: max(_columns() - 1, 0)]
        if text or self._drawn:
            # Spaces instead of an escape sequence, because not every terminal has one.
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"\r{text.ljust(len(self._drawn))}" + ("" if text else "\r"))
                sys.stderr.flush()
        self._drawn = text


class CellOutput:
    """One output of the running cell of a notebook.

    A line on stderr would be kept each time it is drawn, unless the page interprets carriage returns.
    """

    def __init__(self) -> None:
        self._cell: int | None = None
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replace the text of the output; the first text of a cell creates it."""
        cell = import_module("IPython").get_ipython().execution_count
        content = {"text/plain": text}
        if cell == self._cell:
            self._handle.update(content, raw=True)
            return
        self._cell, self._handle = cell, import_module("IPython.display").DisplayHandle()
        self._handle.display(content, raw=True)


PROGRESS = Progress()


def _is_enabled() -> bool:
    if os.environ.get("COTRAIN_PROGRESS", "").lower() in ("0", "off", "no", "false"):
        return False
    return _is_notebook() or bool(_columns()) or log.isEnabledFor(logging.INFO)


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel")


def _columns() -> int:
    """Return the width of a terminal; 0 if stderr is none."""
    if sys.stderr is None:
        return 0
    with suppress(OSError, ValueError):  # it is closed
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            return shutil.get_terminal_size().columns
    return 0


def _duration(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"
