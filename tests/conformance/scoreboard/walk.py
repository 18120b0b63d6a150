"""Walk through the whole API of one SDK against a live server, and print the outcome of each row.

Run as `python -m tests.conformance.scoreboard.walk BASE_MODEL [ROW…]` from the root, under the SDK
that is first on the path. With names of rows, only those are tried. TINKER_BASE_URL and
TINKER_API_KEY set server and key, as for a user.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.conformance.scoreboard import surface
from tests.conformance.scoreboard.calls import Outcome, Recipe, attempt, parameters, perform
from tests.conformance.scoreboard.commands import COMMANDS, Typed, type_command
from tests.conformance.scoreboard.marks import NOT_TRIED
from tests.conformance.scoreboard.place import Place
from tests.conformance.scoreboard.recipes import RECIPES

ASYNC = "_async"


@dataclass(frozen=True)
class Row:
    """One way to call one method."""

    owner: str
    method: str
    option: str
    """Option that the call shows in addition to the method: `(overwrite)`, or empty."""
    recipe: Recipe | None

    @property
    def name(self) -> str:
        """Row name on the page."""
        return f"{self.owner}.{self.method}{self.option}"


@dataclass
class Walk:
    """Runner of rows that collects the arguments that were passed."""

    at: Place
    home: Path
    passed: dict[str, set[str]] = field(default_factory=dict)

    def method(self, row: Row) -> Outcome:
        """Call a method by its recipe."""
        if row.recipe is None:
            return (NOT_TRIED, "")
        recipe = row.recipe

        passed = self.passed.setdefault(f"{row.owner}.{row.method}", set())
        return attempt(lambda: perform(recipe(self.at), row.method, passed))

    def command(self, name: str) -> Outcome:
        """Run a command by its recipe."""
        recipe = COMMANDS.get(name)
        if recipe is None:
            return (NOT_TRIED, "")
        made: list[Typed] = []
        prepared = attempt(lambda: made.append(recipe(self.at)))
        folder = self.home / name.replace(" ", "-")
        return type_command(name, made[0], folder) if made else prepared


def rows(recipes: Mapping[str, Mapping[str, Recipe]], members: Mapping[str, list[str]]) -> list[Row]:
    """Return the rows: each method with its own recipe, then with each of its options."""
    return [
        row
        for owner, methods in members.items()
        for method in methods
        for row in _rows_of(owner, method, recipes.get(owner, {}))
    ]


def _rows_of(owner: str, method: str, recipes: Mapping[str, Recipe]) -> Iterator[Row]:
    yield Row(owner, method, "", recipes.get(method) or recipes.get(method.removesuffix(ASYNC)))
    for name in recipes:
        if name.startswith(f"{method}("):
            yield Row(owner, method, name.removeprefix(method), recipes[name])


def command_rows(recipes: Iterable[str], commands: Iterable[str]) -> list[str]:
    """Return the commands, each followed by its recipes for other conditions."""
    return [
        row for command in commands for row in (command, *(name for name in recipes if name.startswith(f"{command}(")))
    ]


def walk(at: Place, home: Path, wanted: set[str]) -> dict[str, Any]:
    """Try the wanted rows, or all rows if `wanted` is empty."""
    walker = Walk(at, home)
    members = surface.members()
    tried = {row.name: walker.method(row) for row in rows(RECIPES, members) if not wanted or row.name in wanted}
    typed = {
        f"tinker {name}": walker.command(name)
        for name in command_rows(COMMANDS, surface.commands())
        if not wanted or f"tinker {name}" in wanted
    }
    return {
        "version": version("tinker"),
        "rows": {**tried, **typed},
        "unpassed": {} if wanted else _unpassed(members, walker.passed),
    }


def _unpassed(members: Mapping[str, list[str]], passed: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return the arguments that no row passes, for each method that has such arguments."""
    offered = {
        f"{owner}.{method}": parameters(surface.owner(owner), method)
        for owner, methods in members.items()
        for method in methods
        if not method.endswith(ASYNC)
    }
    left = {name: sorted(given - passed.get(name, set())) for name, given in offered.items()}
    return {name: arguments for name, arguments in left.items() if arguments}


if __name__ == "__main__":
    base_model, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = walk(Place(base_model), Path(folder), set(names))
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # clients are still open, and so are threads of unanswered calls
