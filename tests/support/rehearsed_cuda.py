# mypy: disable-error-code="explicit-override, no-untyped-call"
"""CUDA device simulated on the CPU: its refusals, the waits of the host, and the computed values.

Tensors "on CUDA" hold their values on the host and report the device as CUDA. Every op is checked
before it runs. Tensors of two devices must not mix, and kernels accept only the types and strides
of their contracts. An op that would make the host wait for the device is recorded, or refused.
Speed, streams and the order of sums are not simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cotrain_workers.engine.decoding import expert_check, lora_kernel, page_kernel
from cotrain_workers.engine.lora import backend
from tests.support.nested import leaves, mapped
from tests.support.plain_step_experts import PLAYED
from tests.support.rehearsed_kernels import flash, flash_backward, lora_expand, lora_shrink, pages, wide_mm
from tests.support.rehearsed_tensor import (
    Memory,
    OnDevice,
    WouldWait,
    arguments,
    bare,
    dressed,
    is_pinned,
    on_device,
    pin,
)

aten: Any = torch.ops.aten
TOTAL_BYTES = 150_000_000_000  # about that of an H200
#: Under deterministic algorithms these sort the indices first, and read them on the host.
SORTED_WRITES = (aten.index_put_, aten._index_put_impl_, aten.index_copy_, aten.index_copy)
WAITS = (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select)
REFUSED = "not deterministic on CUDA"


class Rehearsal(TorchDispatchMode):
    """Dispatch mode that checks every op, and computes it on the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and a check would take as long as that of an op."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.mode = "default"  # of set_sync_debug_mode
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        name = name_of(packet)
        self.ops[name] += 1
        special = SPECIAL.get(name)
        if special is not None:
            return special(self, func, args, kwargs)
        if packet in WAITS and on_device(args):
            self.wait(name)
        self.check_writes(packet, func, args)
        return self.compute(func, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an op on the device of its tensors, or on the requested one."""
        device = kwargs.get("device")
        asked = None if device is None else torch.device(device).type
        ours, theirs = False, []
        for each in chain(leaves(args), leaves(kwargs)):
            if type(each) is OnDevice:
                ours = True
            elif isinstance(each, torch.Tensor) and each.dim():
                theirs.append(each)
        if ours and theirs:
            shapes = [tuple(each.shape) for each in theirs]
            raise RuntimeError(f"{func}: all tensors on one device, but {shapes} are on the host")
        pins = bool(kwargs.get("pin_memory"))
        given = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        is_here = asked in ("cuda", "meta")  # torch creates its own tensors on its current device
        if is_here:
            given["device"] = torch.device("cpu")
        found = func(*mapped(bare, args), **mapped(bare, given))
        if pins:
            found.is_pinned_here = True
        if not (ours or is_here):
            return found
        if func._schema.is_mutable:
            return written(func, args, kwargs, found)
        return mapped(dressed, found)

    def check_writes(self, packet: Any, func: Any, args: Any) -> None:
        """Record writes that are sorted first."""
        has_source = packet is aten.scatter_ and isinstance(args[-1], torch.Tensor)
        if not (on_device(args) and torch.are_deterministic_algorithms_enabled()):
            return
        if packet in SORTED_WRITES or has_source:
            self.wait(f"{packet}, sorted")
        if packet is aten.cumsum and args[0].dtype.is_floating_point:
            raise RuntimeError(f"{packet}: {REFUSED}")

    def wait(self, what: str) -> None:
        """Record that the host waits."""
        if self.mode == "error":
            raise WouldWait(what)
        self.waits.append(what)


@cache
def name_of(packet: Any) -> str:
    """Return torch's name of an op."""
    return str(packet)


def written(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Return the arguments that an op has written to and returns, as they were passed."""
    given = arguments(func, args, kwargs)
    back = []
    for returned in func._schema.returns:
        info = returned.alias_info
        if info is None or not info.is_write:
            continue
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.before_set == info.before_set:
                back.append(given[argument.name])
    if not back:
        return None
    return back[0] if len(back) == 1 else tuple(back)


def to_copy(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Copy between devices or types."""
    (source,) = args
    asked = kwargs.get("device")
    target = source.device.type if asked is None else torch.device(asked).type
    target = "cuda" if target == "meta" else target
    given = {**kwargs, "device": torch.device("cpu")}
    given.pop("pin_memory", None)
    if target != source.device.type:
        is_free = kwargs.get("non_blocking") and target == "cuda" and is_pinned(source)
        if not is_free and source.numel():
            play.wait(f"copy to {target}")
    found = func(bare(source), **given)
    return OnDevice(found) if target == "cuda" else found


def copy(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Copy into a tensor."""
    to, source = args[:2]
    non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
    if isinstance(to, OnDevice) != isinstance(source, OnDevice) and source.dim():
        host = source if isinstance(to, OnDevice) else to
        if not (non_blocking and is_pinned(host)):
            play.wait("copy between devices")
    bare(to).copy_(bare(source))
    return to


def nothing(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> None:
    """Do nothing, because streams are not simulated."""


def histogram(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the histogram of integers, which only CUDA has."""
    values, *rest = args
    if not isinstance(values, OnDevice):
        return func(*args, **kwargs)
    return OnDevice(func(bare(values).float(), *rest, **kwargs).to(values.dtype))


def of_experts(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a kernel of the experts of a decoder step."""
    return mapped(dressed, PLAYED[name_of(func.overloadpacket)](*mapped(bare, args)))


SPECIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(PLAYED, of_experts),
    "aten._to_copy": to_copy,
    "aten.copy_": copy,
    "aten.histc": histogram,
    "aten.mm": wide_mm,
    "aten.record_stream": nothing,
    "cotrain.attend_pages": pages,
    "cotrain.expand_rows": lora_expand,
    "cotrain.shrink_rows": lora_shrink,
    "torch_attn._varlen_attn": flash,
    "torch_attn._varlen_attn_backward": flash_backward,
}


class Event:
    """Stand-in for a CUDA event or stream, whose work is always done."""

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@contextmanager
def stream(_: Event) -> Iterator[None]:
    """Replace `torch.cuda.stream`."""
    yield


@contextmanager
def rehearsed_cuda(patch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Make `device="cuda"` the simulated device."""
    play, memory = Rehearsal(), Memory()
    OnDevice.memory = memory
    real = torch.Generator

    def set_mode(mode: str) -> None:
        play.mode = mode

    def reset(*_: Any) -> None:
        memory.peak = memory.now

    played: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "synchronize": lambda *_: play.wait("synchronize"),
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: memory.now,
        "max_memory_allocated": lambda *_: memory.peak,
        "reset_peak_memory_stats": reset,
        "mem_get_info": lambda *_: (TOTAL_BYTES - memory.now, TOTAL_BYTES),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=TOTAL_BYTES),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "rehearsal",
        "set_sync_debug_mode": set_mode,
        "Stream": Event,
        "Event": Event,
        "current_stream": Event,
        "stream": stream,
        "graph_pool_handle": lambda: None,
    }
    for name, value in played.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "Generator", lambda *_: real())
    patch.setattr(backend, "missing_kernels", lambda _: "kernels of Triton are not played")
    for module in (expert_check, lora_kernel, page_kernel):
        patch.setattr(module, "missing_kernels", lambda _: None)
    patch.setattr(torch.Tensor, "pin_memory", pin)
    was = torch.are_deterministic_algorithms_enabled()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(device=…) then is a copy like any other
    try:
        with play:
            yield play
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.use_deterministic_algorithms(mode=was)
