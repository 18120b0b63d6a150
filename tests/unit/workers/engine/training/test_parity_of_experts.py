"""Mixtures of experts compared with the eager experts of transformers, and with each run alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.ops import Failure, OptimStep, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.mixtures import SOME, EagerOracle, random_weights
from tests.support.training import ModelFolder, NewEngine, Tenant, relative_error, same_bits

#: Runs with experts of both kinds: shared matrices, and each expert with both of its own.
OWN = AdapterSpec(3, seed=9, alpha=6.0, per_expert=True)
MIXED = (
    Tenant("all-8", AdapterSpec(8, 1), "cross_entropy", (17, 1)),
    Tenant("mlp-5", AdapterSpec(5, 3, train_attn=False, alpha=4.0), "gspo", (5, 30)),
    Tenant("attn-1", AdapterSpec(1, 2, train_mlp=False, train_unembed=False), "ppo", (2, 3)),
    Tenant("own-3", OWN, "importance_sampling", (21, 1)),
)


@pytest.mark.parametrize("family", [*SOME[:1], *map(variant, SOME[1:])])
def test_three_steps_equal_those_of_eager_experts_and_torch_adamw(
    new_engine: NewEngine, model_folder: ModelFolder, family: str
) -> None:
    engine = new_engine(family, dtype=torch.float64)
    oracles = {}
    for tenant in MIXED:
        random_weights(engine, tenant.run, tenant.spec)
        oracle = EagerOracle(model_folder(family), tenant.spec, torch.float64)
        layout = engine.adapters[tenant.run].layout
        oracle.load(layout, engine.adapters.state(tenant.run).weights)
        oracles[tenant.run] = (
            oracle,
            torch.optim.AdamW(oracle.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01),
        )
    for cycle in range(1, 4):
        ops = [op for tenant in MIXED for op in tenant.ops(cycle)]
        found = engine.run(ops).outputs
        for op in ops:
            oracle, optimizer = oracles[op.run]
            if isinstance(op, Pass):
                output = found[op.run, op.seq]
                assert isinstance(output, PassOutput), output
                for datum, ours in zip(op.datums, output.logprobs, strict=True):
                    theirs = oracle.logprobs(datum).detach().float()
                    torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-5)
                if op.needs_grad:
                    oracle.backward(op)
            if isinstance(op, OptimStep):
                torch.nn.utils.clip_grad_norm_(oracle.parameters(), op.grad_clip_norm)
                optimizer.step()
                optimizer.zero_grad()

    for tenant in MIXED:
        adapter = engine.adapters[tenant.run]
        expected = oracles[tenant.run][0].arena(adapter.layout, grads=False)
        # DeepSeek's router rounds to fp32 on any base.
        tolerance = 1e-5 if family == "deepseek_v3" else 1e-9
        assert relative_error(adapter.weights, expected) < tolerance, tenant.run


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (SOME[0], {}),
        *(variant(family, {}) for family in SOME[1:]),
        ("qwen2_moe", {"micro_batch_tokens": 64, "recompute": "always"}),
    ],
)
def test_a_run_of_experts_among_others_equals_the_run_alone(
    new_engine: NewEngine, family: str, settings: dict[str, Any]
) -> None:
    together, alone = new_engine(family, **settings), new_engine(family, **settings)
    for engine in (together, alone):
        for tenant in MIXED:
            random_weights(engine, tenant.run, tenant.spec)
    ruined = replace(MIXED[0], run="ruined")
    random_weights(together, ruined.run, ruined.spec)
    state = together.adapters.state(ruined.run)
    nan = torch.full_like(state.weights, math.nan)
    together.adapters.restore(ruined.run, replace(state, weights=nan))

    for cycle in (1, 2):
        found = together.run([op for tenant in (ruined, *MIXED) for op in tenant.ops(cycle)])
        assert isinstance(found.outputs[ruined.run, 5 * cycle + 1], Failure)
        for tenant in MIXED:
            alone.run(tenant.ops(cycle))

    for tenant in MIXED:
        ours, theirs = (each.adapters.state(tenant.run) for each in (together, alone))
        assert ours.step == 2
        assert same_bits(ours, theirs), tenant.run
