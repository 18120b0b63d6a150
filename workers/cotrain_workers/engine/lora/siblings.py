"""Modules that read the same input, and results that they compute together."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from cotrain_workers.engine.spec import Target

T = TypeVar("T")

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def shared_input(target: Target) -> tuple[str, str]:
    """Return a key that is equal for modules that read the same x."""
    parent, _, name = target.name.rpartition(".")
    return parent, next((names[0] for names in SIBLINGS if name in names), name)


class SiblingResults(Generic[T]):
    """Results for modules that read the same `x`: the first one computes those of all, each takes its own."""

    def __init__(self) -> None:
        self._x: torch.Tensor | None = None
        self._left: dict[str, T] = {}

    def take(self, module: str, x: torch.Tensor, compute: Callable[[], dict[str, T]]) -> T:
        """Return the result of `module`; `compute` returns those of all modules that read `x`."""
        if self._x is None or not is_same(self._x, x) or module not in self._left:
            self._x, self._left = x, compute()
        found = self._left.pop(module)
        if not self._left:
            self._x = None
        return found


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors are views of the same values. Each module may make a view of its input."""
    one, other = ((each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride()) for each in (x, y))
    return x is y or one == other
