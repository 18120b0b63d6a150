"""What a process writes of its start is read once, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_server.supervisor.startup_progress import NewLines, doing_in

if TYPE_CHECKING:
    from pathlib import Path


def test_only_what_is_added_is_read_and_only_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    assert NewLines(log).take() == []  # not there yet
    log.write_text("of an earlier start\n")
    lines = NewLines(log)
    with log.open("a") as written:
        for text, found in [("one\ntw", ["one"]), ("", []), ("o\nthree\n", ["two", "three"])]:
            written.write(text)
            written.flush()
            assert lines.take() == found
    log.write_text("new\n")  # emptied, since it had grown large
    assert lines.take() == ["new"]


def test_a_line_of_a_start_says_what_is_done() -> None:
    assert doing_in('{"ts": "x", "event": "starting", "doing": "loading"}') == "loading"
    for other in ('{"event": "cycle_committed"}', "no JSON", "[]", '"starting"'):
        assert doing_in(other) is None
