"""Libraries of the extra `export`, imported on demand."""

from importlib import import_module
from typing import Any

from cotrain.errors import LibraryMissing


def library(name: str) -> Any:
    """Import a library by its name. Raises LibraryMissing with the command that installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise LibraryMissing(
            f"cotrain export needs {error.name}: pip install -c constraints.txt '.[export]'"
        ) from error
