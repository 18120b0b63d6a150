"""API keys as `cotrain serve` is given them: on its command line, in a variable, in a file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cotrain_server.settings import split_words
from cotrain_store.tenants.key_format import read_chosen_keys

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OPTION = "--api-key"


def out_of_sight(keys: Sequence[str]) -> None:
    """Start this command anew with `keys` in its environment, if it has some among its arguments.

    Every user of the host can read those (`ps`) for as long as the process lives.
    """
    arguments = without_option(sys.orig_argv[1:], OPTION)
    if len(arguments) == len(sys.orig_argv) - 1:
        return
    environment = {**os.environ, "COTRAIN_API_KEYS": ",".join(keys)}
    os.execve(sys.executable, [sys.executable, *arguments], environment)  # noqa: S606  # ourselves


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Leave out an option and its values, written `--option VALUE` or `--option=VALUE`."""
    is_value = [False, *(argument == option for argument in arguments)]
    return [
        argument
        for argument, of_option in zip(arguments, is_value, strict=False)
        if not of_option and argument != option and not argument.startswith(f"{option}=")
    ]


def all_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Put the keys of a file (`-`: standard input) behind the others.

    Raises:
        InvalidKey: one has not the form, or is too easy to guess.
        OSError: the file cannot be read.
    """
    keys = (*given, *split_words(_content(file)))
    read_chosen_keys(keys)
    return keys


def _content(file: Path | None) -> str:
    if file is None:
        return ""
    return sys.stdin.read() if str(file) == "-" else file.read_text()
