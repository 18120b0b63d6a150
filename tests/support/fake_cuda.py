# mypy: disable-error-code="explicit-override, no-untyped-call"
"""CUDA device without a GPU: tensors with shapes and without values, of any size, and a log of the
bytes of each op.

FakeTensorMode provides shapes, types and devices. The preloaded library of `fake_cuda.cpp` stands
in for the device that this torch lacks. An op that would read a value on the host raises, unless it
is simulated here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import head_traffic, lora_traffic, step_traffic
from tests.support.nested import leaves, mapped

SOURCE = Path(__file__).with_suffix(".cpp")
TRAFFIC = {**lora_traffic.BYTES, **step_traffic.BYTES, **head_traffic.BYTES}  # the engine's own kernels
TOTAL_BYTES = 150_000_000_000  # about that of an H200
#: Ops that launch nothing.
VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "device",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_pinned",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "permute",
        "record_stream",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "unfold",
        "view",
        "_reshape_alias",
        "_unsafe_view",
    ]
)


class NoCompiler(RuntimeError):
    """There is no C++ compiler, so the device cannot be built."""


def library() -> Path:
    """Build the library for the installed torch, unless it exists. Raises NoCompiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoCompiler
    root = Path(torch.__file__).parent
    build = f"{os.getuid()}-{torch.__version__}-{zlib.crc32(bytes(root)):08x}"
    built = Path(tempfile.gettempdir(), f"cotrain-fake-cuda-{build}.so")
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
        new = built.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(new)]
        subprocess.run([*command, *paths, "-ltorch_cpu", "-lc10"], check=True)
        new.replace(built)
    return built


def preloaded(module: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a Python module with the device preloaded. Raises NoCompiler."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Launch:
    """One op: its name, its bytes read and written, and its arguments."""

    name: str
    bytes: int
    args: Any = field(repr=False)
    out: Any = field(repr=False)


class LaunchLog(TorchDispatchMode):
    """Log of every launch on the device, and of the memory in use."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and a check would take as long as recording an op."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.peak = self._now = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS or name.startswith(("empty", "new_empty")):
            self._hold(out, given={each.untyped_storage()._cdata for each in tensors((args, kwargs))})
        if name not in VIEWS:
            self.note(name, args, kwargs, out)
        return out

    def note(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Record a launch that reads `args` and writes `out`."""
        # An op that reads or writes some of the values of a tensor touches only those.
        if name == "index_copy_":
            size = 2 * bytes_of(args[3])
        elif name in ("gather", "scatter_"):
            size = bytes_of(args[2:]) + 2 * args[2].numel() * args[0].element_size()
        elif name in TRAFFIC:
            size = TRAFFIC[name](*args)
        else:
            given = {key: each for key, each in (kwargs or {}).items() if key != "out"}
            size = bytes_of((args, given, out))
        if size:
            # No tensor is kept: it would hold memory that the engine has freed.
            shapes = mapped(lambda each: tuple(each.shape) if is_tensor(each) else each, list(args))
            self.launches.append(Launch(name, size, shapes, [tuple(o.shape) for o in tensors(out)]))

    def _hold(self, out: Any, given: set[int]) -> None:
        """Count the storages that an op has made."""
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            known = StorageWeakRef(storage)
            is_new = storage._cdata not in given and known.cdata not in self._held
            if is_new and tensor.device.type != "cpu":
                self._held[known.cdata] = (known, storage.nbytes())
                self._now += storage.nbytes()
        if self._now > self.peak:
            for cdata, (known, size) in list(self._held.items()):
                if known.expired():
                    del self._held[cdata]
                    self._now -= size
            self.peak = max(self.peak, self._now)


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors on the device in a value."""
    return [each for each in leaves(value) if is_tensor(each) and each.device.type == "cuda"]


def bytes_of(value: Any) -> int:
    """Return the size of all tensors in a value."""
    return sum(each.numel() * each.element_size() for each in tensors(value))


class Played:
    """Stand-in for a CUDA event or stream."""

    def __init__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@contextmanager
def no_stream(_: Any) -> Iterator[None]:
    """Replace `torch.cuda.stream`."""
    yield


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Make `device="cuda:0"` this device. The process must have the library preloaded."""
    facts = SimpleNamespace(total_memory=TOTAL_BYTES)
    played: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (TOTAL_BYTES, TOTAL_BYTES),
        "get_device_properties": lambda *_: facts,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "no device",
        "Stream": Played,
        "Event": Played,
        "current_stream": Played,
        "stream": no_stream,
    }
    real = torch.Generator

    def generator(*_: Any) -> torch.Generator:
        return real()

    with ExitStack() as stack:
        for name, value in played.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        tensor = {"pin_memory": lambda own, *_: torch.empty_like(own), "record_stream": lambda *_: None}
        for name, value in tensor.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", generator))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def counts(launches: Sequence[Launch]) -> Counter[str]:
    """Return the number of launches of each op.

    A sort has eight: indices, a histogram, and passes over the digits of its keys.
    """
    found: Counter[str] = Counter()
    for each in launches:
        found[each.name] += 8 if each.name == "sort" else 1
    return found
