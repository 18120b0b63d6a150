"""Options of a scenario: a table of names and defaults, from which the type of each follows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """One of some values."""

    values: Sequence[str]
    is_required: bool = False


class Some(NamedTuple):
    """Comma-separated list of some values; all by default."""

    values: Sequence[str]


#: Default of each option, or (default, help). A type in place of a default: the option has none.
Options = Mapping[str, Any]

DEVICE: Options = {
    "device": Choice(("cpu", "cuda"), is_required=True),
    "threads": (0, "of torch; 0: its own choice"),
    "models": (Path, "folder that keeps the random models between calls"),
}


def names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Return the numbers in a comma-separated list."""
    return [int(number) for number in text.split(",")]


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Add the options of a scenario, and the folder of its record."""
    for name, given in {**options, "out": (Path("bench/results"), "folder of the record")}.items():
        default, text = given if type(given) is tuple else (given, None)
        parser.add_argument(f"--{name.replace('_', '-')}", **described(default, text))


def described(default: Any, text: str | None) -> dict[str, Any]:
    """Return the arguments of `add_argument` for one option."""
    kind: Callable[[str], Any]
    match default:
        case Choice(values, is_required):
            return {"choices": tuple(values), "required": is_required, "help": text}
        case Some(values):
            listed = f"some of {', '.join(values)} (default: all)"
            return {"type": some_of(values), "default": list(values), "help": listed}
        case False:
            return {"action": "store_true", "help": text}
        case [int(), *_]:
            kind, shown = numbers, ",".join(map(str, default))
        case [str(), *_]:
            kind, shown = names, ",".join(default)
        case _ if callable(default):
            return {"type": default, "help": text}
        case _:
            kind, shown = type(default), default
    return {"type": kind, "default": default, "help": f"{text or ''} (default: {shown})".lstrip()}


def some_of(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated lists that refuses other values."""

    def parse(text: str) -> list[str]:
        for name in names(text):
            if name not in values:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(values)}")
        return names(text)

    return parse
