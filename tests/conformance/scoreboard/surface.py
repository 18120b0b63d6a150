"""Public API of an SDK, found by inspection: there is no list of names to maintain."""

from __future__ import annotations

import inspect
import types
from typing import Any

import click
import tinker.lib.public_interfaces
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces.rest_client import RestClient

# Types of attributes that are methods; a nested class is not.
METHODS = (types.FunctionType, staticmethod, classmethod, property)
NO_CLASSES_OF_THEIR_OWN = {"AwaitableConcurrentFuture"}  # internal types of an APIFuture


def classes() -> dict[str, type]:
    """Return every public class of the SDK with methods, by name.

    Older versions do not export all of them.
    """
    exported = vars(tinker.lib.public_interfaces).items()
    found = {name: each for name, each in exported if inspect.isclass(each)}
    found[RestClient.__name__] = RestClient
    return {
        name: found[name]
        for name in sorted(found.keys() - NO_CLASSES_OF_THEIR_OWN)
        if not name.startswith("_") and methods(found[name])
    }


def methods(owner: type) -> list[str]:
    """Return every public method and property of a class, including inherited ones."""
    names = (name for name in dir(owner) if not name.startswith("_"))
    return [name for name in names if isinstance(inspect.getattr_static(owner, name), METHODS)]


def members() -> dict[str, list[str]]:
    """Return every public method of every class, and the functions of `tinker.auth` if it exists."""
    found = {name: methods(each) for name, each in classes().items()}
    functions = getattr(getattr(tinker, "auth", None), "__all__", ())
    return {**found, "auth": sorted(functions)} if functions else found


def owner(name: str) -> Any:
    """Return the class or the module of a name in `members`."""
    return tinker.auth if name == "auth" else classes()[name]


def commands() -> list[str]:
    """Return every command of the command line, as it is typed: `checkpoint list`."""
    return sorted(" ".join(path) for path in _leaves(main_cli, ()))


def _leaves(command: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    return [
        leaf
        for name in command.list_commands(context)
        for leaf in _leaves(command.get_command(context, name), (*path, name))
    ]
