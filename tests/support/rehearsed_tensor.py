# typing.override begins with Python 3.12, and torch's base classes are only partly typed.
# mypy: disable-error-code="explicit-override, override, assignment"
"""Tensors that hold their values on the host and report CUDA as their device. See `rehearsed_cuda.py`."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, ClassVar

import torch

from tests.support.nested import leaves

DEVICE = torch.device("cuda", 0)


class WouldWait(RuntimeError):
    """The host would wait for the device."""


class Memory:
    """Storages of the tensors on the device."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._users: Counter[int] = Counter()

    def hold(self, tensor: OnDevice) -> None:
        """Count a tensor's storage until the tensor is freed."""
        storage = tensor.held.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self._users[place] += 1
        if self._users[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._let_go, place, size)

    def _let_go(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.now -= size


class OnDevice(torch.Tensor):
    """Tensor that reports CUDA as its device."""

    held: torch.Tensor
    memory: ClassVar[Memory]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),
        )
        made.held = held
        cls.memory.hold(made)
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the rehearsal")


def on_device(args: Any) -> bool:
    """Return True if any argument is on the device."""
    return any(isinstance(each, OnDevice) for each in leaves(args))


def bare(value: Any) -> Any:
    """Return the host tensor of a value on the device, and other values unchanged."""
    return value.held if isinstance(value, OnDevice) else value


def dressed(value: Any) -> Any:
    """Return a host tensor as one on the device, and other values unchanged."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)
    return OnDevice(value) if is_plain else value


def arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
    named = {each.name: each.default_value for each in func._schema.arguments}
    return {**named, **dict(zip(named, args, strict=False)), **kwargs}


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return True if host memory is pinned."""
    return bool(getattr(tensor, "is_pinned_here", False))


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a pinned copy, in place of `Tensor.pin_memory`."""
    if isinstance(tensor, OnDevice):
        raise TypeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    found = tensor.clone()
    found.is_pinned_here = True  # type: ignore[attr-defined]
    return found
