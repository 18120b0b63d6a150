"""Values in the arguments and results of a torch op: nested in tuples, lists and dicts only.

`torch.utils._pytree` supports every type, but takes longer than the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: Compared by exact type, because `isinstance`, above all with a union, takes longer than the rest
#: here. torch uses plain ones.
NESTED = frozenset((tuple, list, dict))


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values, in order."""
    kind = type(value)
    if kind not in NESTED:
        yield value
        return
    for each in value.values() if kind is dict else value:
        if type(each) in NESTED:
            yield from leaves(each)
        else:
            yield each


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy with `function` applied to each value."""
    kind = type(value)
    if kind not in NESTED:
        return function(value)
    if kind is dict:
        return {
            name: mapped(function, each) if type(each) in NESTED else function(each) for name, each in value.items()
        }
    return kind([
        mapped(function, each) if type(each) in NESTED else function(each) for each in value
    ])  # fmt: skip
