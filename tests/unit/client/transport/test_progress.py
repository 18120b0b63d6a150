"""Progress line of a client: shown only during long waits on a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from cotrain.transport import progress as module
from cotrain.transport.progress import Progress, ServerMessage, Wait, line
from tests.support.waiting import until

STEP = "optim_step 4 of run r, still running"


class Stream(io.StringIO):
    """Stderr that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    @override
    def isatty(self) -> bool:
        return self._is_terminal

    def shown(self) -> str:
        """Return the text of the line as a terminal displays it."""
        cells: list[str] = []
        at = 0
        for character in self.getvalue():
            if character == "\r":
                at = 0
                continue
            cells[at : at + 1] = [character]
            at += 1
        return "".join(cells).rstrip()


def write_to(stream: Stream | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace stderr for this module alone, because pytest restores its own between phases."""
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream(is_terminal=True)
    write_to(stream, monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COTRAIN_PROGRESS", raising=False)
    monkeypatch.setattr(module, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(module, "DRAWN_EVERY_S", 0.01)
    return stream


def waits(*since: float) -> list[Wait]:
    return [Wait(each, lambda: STEP) for each in since]


def test_a_short_wait_shows_no_line() -> None:
    assert line([], None, 100.0) is None
    assert line(waits(90.5, 99.0), ServerMessage("busy", 200.0), 100.0) is None


def test_a_long_wait_shows_its_subject_duration_and_reason() -> None:
    assert line(waits(77.0), None, 100.0) == f"waiting 23 s for {STEP}"
    text = line(waits(10.0, 20.0, 99.5), ServerMessage("429: full", 101.0), 100.0)
    assert text == f"waiting 1 min 30 s for {STEP} and 2 more · 429: full"
    assert line(waits(77.0), ServerMessage("long ago", 99.0), 100.0) == f"waiting 23 s for {STEP}"


def test_control_characters_of_the_server_are_not_drawn() -> None:
    text = line(waits(0.0), ServerMessage("a\x1b[2Jb\n", 101.0), 100.0)
    assert text is not None
    assert text.isprintable()


async def test_the_line_is_drawn_on_a_terminal_and_cleared(terminal: Stream) -> None:
    progress = Progress()
    with progress.waiting(lambda: STEP):
        await until(lambda: STEP in terminal.shown())
        progress.show_message("503: starting", 60.0)
        await until(lambda: "503: starting" in terminal.shown())
        assert terminal.shown().startswith("cotrain: waiting 0 s for optim_step 4 of run r")
        with progress.hidden():
            progress.clear()
            progress.show()
            assert terminal.shown() == ""
    progress.show()
    assert terminal.shown() == ""
    assert "\n" not in terminal.getvalue()


async def test_the_line_is_at_most_as_wide_as_the_terminal(terminal: Stream) -> None:
    progress = Progress()
    with progress.waiting(lambda: "x" * 200):
        await until(lambda: terminal.shown() != "")
        assert len(terminal.shown()) == 79


@pytest.mark.parametrize(
    ("variable", "value"), [("COTRAIN_PROGRESS", "0"), ("COTRAIN_PROGRESS", "off"), ("TERM", "dumb")]
)
def test_the_line_can_be_turned_off(
    terminal: Stream, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    progress = Progress()
    with progress.waiting(lambda: STEP):
        progress.show()
    assert terminal.getvalue() == ""
    assert progress._thread is None


async def test_a_log_gets_one_record_per_minute_on_request_instead_of_a_line(
    terminal: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    piped = Stream(is_terminal=False)
    write_to(piped, monkeypatch)
    progress = Progress()
    with progress.waiting(lambda: STEP):
        assert progress._thread is None  # no output needs it yet
    caplog.set_level(logging.INFO, "cotrain")
    with progress.waiting(lambda: STEP):
        await until(lambda: bool(caplog.messages))
        progress.show()
    assert caplog.messages == [f"waiting 0 s for {STEP}"]
    assert piped.getvalue() == terminal.getvalue() == ""


def test_a_closed_stderr_is_tolerated(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = [None, Stream(is_terminal=True)]
    closed[1].close()
    for stream in closed:
        write_to(stream, monkeypatch)
        progress = Progress()
        with progress.waiting(lambda: STEP):
            progress.show()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_process_draws_its_own_line(terminal: Stream) -> None:
    progress = Progress()
    with progress.waiting(lambda: STEP):
        await until(lambda: STEP in terminal.shown())
        with progress._drawing:  # the worst moment to fork
            child = os.fork()
            if not child:
                with progress.waiting(lambda: "the child's"):
                    progress.show()
                    os._exit(0 if "the child's" in terminal.shown() else 1)
        ended = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
