"""Recomputation of the decoder layers: the same bits, far less memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Op, OptimStep, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.engine_checks import gradient_passes
from tests.support.training import MIX, NewEngine, random_datum, same_bits


@pytest.mark.parametrize("family", [variant("qwen3"), "gemma2"])
def test_recomputing_changes_no_bit(new_engine: NewEngine, family: str) -> None:
    kept, recomputed = (new_engine(family, micro_batch_tokens=64, recompute=policy) for policy in ("never", "always"))
    for cycle in range(2):
        ops = [op for tenant in MIX for op in tenant.ops(cycle)]
        ours, theirs = kept.run(ops).outputs, recomputed.run(ops).outputs
        for op in ops:
            mine, other = ours[op.run, op.seq], theirs[op.run, op.seq]
            if isinstance(mine, PassOutput):
                assert isinstance(other, PassOutput)
                assert [a.tobytes() for a in mine.logprobs] == [b.tobytes() for b in other.logprobs]
    for tenant in MIX:
        assert same_bits(kept.adapters.state(tenant.run), recomputed.adapters.state(tenant.run)), tenant.run


def test_neighbours_change_no_bit_while_recomputing(new_engine: NewEngine) -> None:
    together, alone = (new_engine(recompute="always") for _ in range(2))
    together.run([op for tenant in MIX for op in tenant.ops(0)])
    for tenant in MIX:
        alone.run(tenant.ops(0))
        assert same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)), tenant.run


def kept_bytes(engine: Engine) -> int:
    """Return the bytes that one micro-batch keeps for its backward, without the base model's weights."""
    weights = {p.untyped_storage().data_ptr() for p in engine._base.backbone.parameters()}
    by_storage: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    engine.run([op for tenant in MIX for op in tenant.ops(0) if not isinstance(op, Pass)])
    passes = [op for op in gradient_passes() if op.needs_grad]
    peak, backbone = [0], engine._base.backbone
    backbone.register_forward_hook(lambda *_: peak.append(sum(by_storage.values())))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.run(passes)
    return peak[1]


@pytest.mark.parametrize("family", ["qwen3", variant("gemma2")])
def test_recomputing_keeps_a_fraction_of_the_memory(new_engine: NewEngine, family: str) -> None:
    kept, recomputed = (kept_bytes(new_engine(family, recompute=choice)) for choice in ("never", "always"))

    # Two layers keep only their inputs and outputs, the positions and the last norm.
    assert 0 < recomputed < kept / 4


def test_a_micro_batch_too_large_is_recomputed_before_it_is_split(new_engine: NewEngine) -> None:
    large, small = (new_engine() for _ in range(2))
    rng = np.random.default_rng(0)
    datums = [random_datum(rng, "cross_entropy", length) for length in (60, 50)]
    backward = Pass("run", 1, datums, "cross_entropy", {}, needs_grad=True)
    ops: list[Op] = [Create("run", 0, AdapterSpec(4, seed=0)), backward]

    def refuse_to_keep(*_: object) -> None:
        if not small._base.recompute.is_on:
            raise torch.OutOfMemoryError

    small._base.backbone.register_forward_pre_hook(refuse_to_keep)
    large.run(ops)
    out = small.run(ops)

    assert (out.forwards, small.halvings, small.cut_slices) == (2, 0, 0)
    assert same_bits(small.adapters.state("run"), large.adapters.state("run"))
    assert small.run([replace(backward, seq=2)]).forwards == 1  # its size is remembered


def test_a_forward_only_pass_recomputes_nothing(new_engine: NewEngine) -> None:
    engine, calls = new_engine(recompute="always"), [0]
    attention = engine._base.backbone.get_submodule("layers.0.self_attn")
    attention.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    tenant = MIX[0]

    engine.run(tenant.ops(0)[:1])
    engine.run([op for op in tenant.ops(0) if isinstance(op, Pass) and not op.needs_grad])
    assert calls == [1]

    engine.run([op for op in tenant.ops(0)[1:] if not isinstance(op, OptimStep)])
    assert calls == [1 + 2]
