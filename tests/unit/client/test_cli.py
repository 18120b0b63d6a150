from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from cotrain import __version__
from cotrain.cli import COMMANDS, command_line, needed
from tests.support.draws import variant

HERE = EntryPoint("version2", "cotrain.cli:version", COMMANDS)
MISSING = EntryPoint("serve", "a_library_that_is_not_there.cli:serve", COMMANDS)


def test_the_version_is_printed() -> None:
    for asked in ("version", "--version"):
        result = CliRunner().invoke(command_line([HERE]), [asked])
        assert (result.exit_code, result.output) == (0, f"cotrain {__version__}\n")


def test_every_command_has_a_description_and_runnable_examples() -> None:
    command: Any = typer.main.get_command(command_line(entry_points(group=COMMANDS)))
    for words in commands_of(command):
        shown = click.testing.CliRunner().invoke(command, [*words, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, words
        assert "Examples:" in shown.output, words
        assert f"cotrain {' '.join(words)}" in shown.output.partition("Examples:")[2], words
        assert "\N{TRAM CAR}" not in shown.output, words


def commands_of(command: Any) -> Iterator[list[str]]:
    """Yield the words of every command below `command`."""
    for name, each in getattr(command, "commands", {}).items():
        if hasattr(each, "commands"):
            yield from ([name, *words] for words in commands_of(each))
        else:
            yield [name]


def test_a_command_of_another_package_is_found_by_its_entry_point() -> None:
    result = CliRunner().invoke(command_line([HERE]), ["version2"])
    assert (result.exit_code, result.output) == (0, f"cotrain {__version__}\n")


def test_a_command_with_missing_libraries_says_what_to_install() -> None:
    app = command_line([MISSING])
    result = CliRunner().invoke(app, ["serve", "--base-model", "m", "--help"])
    assert result.exit_code == 1
    assert "a_library_that_is_not_there is not installed" in result.output
    assert "pip install -c constraints.txt '.[all]'" in result.output
    assert CliRunner().invoke(app, ["version"]).exit_code == 0
    assert "'.[all]'" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


def test_a_command_of_the_client_needs_no_other_package() -> None:
    for line in ("runs list", "version --json", "selfcheck", "sample x"):
        assert not list(needed([MISSING], line.split()))
    for line in ("", "--help", "serve --port 1", "unknown"):
        assert list(needed([MISSING], line.split())) == [MISSING]


@pytest.mark.parametrize("encoding", ["cp1252", variant("latin-1"), variant("ascii")])
def test_a_character_that_a_terminal_cannot_encode_is_a_question_mark(encoding: str) -> None:
    program = (
        "import typer, sys; from rich.table import Table\n"
        "from cotrain.cli import replace_what_cannot_be_encoded\n"
        "from cotrain.commands.sample import _show\n"
        "from cotrain.commands.terminal import failing_in_a_sentence, print_json, print_rich\n"
        "replace_what_cannot_be_encoded()\n"
        "table = Table('note'); table.add_row('你好'); print_rich(table)\n"
        "_show('a ☕ b'); print_json({'note': '你好'})\n"
        "with failing_in_a_sentence(): raise ValueError('no 你好')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert ended.returncode == 1
    assert b"UnicodeEncodeError" not in ended.stderr
    assert b"??" in ended.stdout
    if encoding != "ascii":  # click writes UTF-8 to an ASCII terminal
        assert b"a ? b" in ended.stdout
        assert b"no ??" in ended.stderr
