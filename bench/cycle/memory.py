"""Measured memory of an adapter and of a token, next to the formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.cycle.load import RANK, Load, create_runs, passes, run, steps
from bench.support.model import SHAPES
from bench.support.roofline import adapter_bytes
from bench.support.timing import synchronize
from cotrain_workers.engine.engine import Engine


@dataclass
class SavedBytes:
    """Memory that autograd saves for backward: bytes of distinct live storages, and their peak."""

    now: int = 0
    peak: int = 0
    _users_by_storage: dict[int, int] = field(default_factory=dict)

    def keep(self, saved: torch.Tensor) -> Kept | torch.Tensor:
        """Count a saved tensor; weights stay in memory anyway."""
        if isinstance(saved, torch.nn.Parameter):
            return saved
        return Kept(saved, self)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count one more user of a storage."""
        users = self._users_by_storage.get(storage.data_ptr(), 0)
        self._users_by_storage[storage.data_ptr()] = users + 1
        if not users:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Remove one user of a storage."""
        self._users_by_storage[storage.data_ptr()] -= 1
        if not self._users_by_storage[storage.data_ptr()]:
            self.now -= storage.nbytes()


class Kept:
    """A saved tensor; the graph releases it after its node has run."""

    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor
        self._counter = counter
        counter.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._counter.remove(self.tensor.untyped_storage())


def measure_memory(engine: Engine, size: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return bytes per adapter (CUDA) and per token, next to the formulas."""
    shape = SHAPES[size]
    few, many = tokens_of_two(device)
    saved = [saved_bytes(engine, load) for load in (few, many)]
    row: dict[str, Any] = {
        "saved_per_token": (saved[1] - saved[0]) / (many.tokens - few.tokens),
        "ideal_per_token": layer_bytes_per_token(
            hidden=shape.hidden,
            intermediate=shape.mlp,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head,
            layers=shape.layers,
            value_bytes=dtype.itemsize,
        ),
        "ideal_per_adapter": adapter_bytes(shape, RANK, dtype),
    }
    if device == "cuda":
        peaks = [peak_bytes(engine, load) for load in (few, many)]
        row["peak_per_token"] = (peaks[1] - peaks[0]) / (many.tokens - few.tokens)
        row["per_adapter"] = bytes_per_new_adapter(engine)
    return row


def tokens_of_two(device: str) -> tuple[Load, Load]:
    """Return two loads that fit into one forward, the second twice as large as the first."""
    length = 64 if device == "cpu" else 512
    return Load(2, length, (1,)), Load(4, length, (1,))


def saved_bytes(engine: Engine, load: Load) -> int:
    """Return the peak of the bytes that autograd saves during one pass."""
    create_runs(engine, 1)
    counter = SavedBytes()
    with saved_tensors_hooks(
        counter.keep, lambda kept: kept.tensor if isinstance(kept, Kept) else kept
    ):
        run(engine, passes(load, 1, engine.facts.vocab_size))
    run(engine, steps(1))
    return counter.peak


def peak_bytes(engine: Engine, load: Load) -> int:
    """Return the peak of allocated device memory during one pass."""
    ops = passes(load, 1, engine.facts.vocab_size)
    run(engine, ops)
    synchronize("cuda")
    torch.cuda.reset_peak_memory_stats()
    run(engine, ops)
    synchronize("cuda")
    peak = torch.cuda.max_memory_allocated()
    run(engine, steps(1))
    return peak


def bytes_per_new_adapter(engine: Engine) -> float:
    """Return the device bytes per adapter, for four new adapters that have trained."""
    load = Load(4, 64, (4,))
    names = [f"run-{at}" for at in range(4)]
    for name in names:
        engine.adapters.drop(name)
    synchronize("cuda")
    before = torch.cuda.memory_allocated()
    create_runs(engine, 4)
    run(engine, passes(load, 4, engine.facts.vocab_size))
    synchronize("cuda")
    after = torch.cuda.memory_allocated()
    run(engine, steps(4))
    return (after - before) / 4


def layer_bytes_per_token(
    *,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    value_bytes: int = 2,
) -> float:
    """Return the bytes per token that the decoder layers of a Qwen3 save, as a check of the measurement.

    Ideally these are: inputs and outputs of both norms; q and k before and after their norms, v, and the output
    of attention; gate, up and their product. Measured figures are about 1.4 times higher, because the norms and
    the gate of transformers keep fp32 copies and intermediate products.
    """
    attention = 3.0 * (heads + kv_heads) * head_dim
    return layers * value_bytes * (4.0 * hidden + attention + 3.0 * intermediate)
