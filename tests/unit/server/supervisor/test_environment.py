"""Each process gets its own settings, and a typo stops the server.

What a process writes of its start is read once, line by line.
"""

from __future__ import annotations

from pathlib import Path

from cotrain_server.supervisor import environment as variables
from cotrain_server.supervisor.environment import NewLines, doing_in


def test_a_process_gets_its_own_variables_and_no_others() -> None:
    inherited = {
        "PATH": "/bin",
        "COTRAIN_CLOCK_MODE": "metronome",
        "COTRAIN_DTYPE": "float32",
        "COTRAIN_LOG_LEVEL": "debug",
    }
    made = variables.environment(variables.WORKER, {"LOG_LEVEL": "info"}, inherited)
    assert made == {"PATH": "/bin", "COTRAIN_DTYPE": "float32", "COTRAIN_LOG_LEVEL": "info"}


def test_a_flag_wins_over_the_environment_but_not_where_it_does_not_belong() -> None:
    made = variables.environment(
        variables.API, {"PORT": "1", "DEVICE": "cpu"}, {"COTRAIN_PORT": "2"}
    )
    assert made == {"COTRAIN_PORT": "1"}


def test_a_misspelt_variable_is_found_and_a_clients_is_not() -> None:
    environ = {"COTRAIN_CLOCK_MOD": "x", "COTRAIN_BASE_URL": "x", "COTRAIN_PROGRESS": "0", "A": "b"}
    assert variables.refused_variables(environ) == ["Unknown settings: COTRAIN_CLOCK_MOD."]


def test_every_process_gets_its_failpoints() -> None:
    inherited = {"COTRAIN_FAILPOINTS": "x", "COTRAIN_FAILPOINTS_LOG": "y"}
    assert variables.environment(variables.API, {}, inherited) == inherited
    assert variables.refused_variables(inherited) == []


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
