from __future__ import annotations

from importlib.metadata import EntryPoint

from typer.testing import CliRunner

from cotrain import __version__
from cotrain.cli import COMMANDS, command_line

HERE = EntryPoint("version2", "cotrain.cli:version", COMMANDS)
MISSING = EntryPoint("serve", "a_library_that_is_not_there.cli:serve", COMMANDS)


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(command_line([HERE]), ["version"])
    assert (result.exit_code, result.output) == (0, f"cotrain {__version__}\n")


def test_a_command_of_another_package_is_found_by_its_entry_point() -> None:
    result = CliRunner().invoke(command_line([HERE]), ["version2"])
    assert (result.exit_code, result.output) == (0, f"cotrain {__version__}\n")


def test_a_command_whose_libraries_are_missing_says_what_to_install() -> None:
    app = command_line([MISSING])
    result = CliRunner().invoke(app, ["serve", "--base-model", "m", "--help"])
    assert result.exit_code == 1
    assert "a_library_that_is_not_there is not installed" in result.output
    assert "pip install -c constraints.txt '.[all]'" in result.output
    assert CliRunner().invoke(app, ["version"]).exit_code == 0
