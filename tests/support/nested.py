"""The values in what a torch op is given and gives: nested in tuples, lists and dicts, and in nothing else.

`torch.utils._pytree` knows every type there is, and takes longer over an op than the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: By exact type: asking with `isinstance`, above all for a union, takes longer than all else here. torch gives
#: and takes plain ones.
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
    """Return the same with `function` of each value."""
    kind = type(value)
    if kind not in NESTED:
        return function(value)
    if kind is dict:
        return {
            name: mapped(function, each) if type(each) in NESTED else function(each)
            for name, each in value.items()
        }
    return kind([
        mapped(function, each) if type(each) in NESTED else function(each) for each in value
    ])  # fmt: skip
