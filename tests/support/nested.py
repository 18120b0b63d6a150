"""The values in what a torch op is given and gives: nested in tuples, lists and dicts, and in nothing else.

`torch.utils._pytree` knows every type there is, and takes longer over an op than the op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        yield value
        return
    for each in value:
        if isinstance(each, tuple | list | dict):
            yield from leaves(each)
        else:
            yield each


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same with `function` of each value."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)
