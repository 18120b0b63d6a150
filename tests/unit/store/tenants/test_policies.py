from __future__ import annotations

from dataclasses import replace

from cotrain_store.messages.runs import LoraSpec
from cotrain_store.tenants.policies import LEAST_QUOTA, RunWeight, default_quota, state_bytes, weigh_run
from tests.support.stack import pool_record_for_tests

POOL = replace(pool_record_for_tests(), max_rank=64, lora_widths={"attn": 100, "mlp": 1000, "unembed": 10_000})


def test_a_state_has_four_fp32_values_per_trained_parameter() -> None:
    lora = LoraSpec(rank=8, seed=0)
    assert state_bytes(lora, POOL) == 16 * 8 * 11_100
    assert state_bytes(replace(lora, train_unembed=False), POOL) == 16 * 8 * 1_100
    assert state_bytes(replace(lora, train_attn=False, train_mlp=False), POOL) == 16 * 8 * 10_000
    experts = replace(POOL, lora_widths={**POOL.lora_widths, "experts": 5000})
    assert state_bytes(lora, experts) == state_bytes(lora, POOL)
    assert state_bytes(replace(lora, per_expert=True), experts) == 16 * 8 * 16_100


def test_the_default_quota_is_a_minimum_or_that_of_eight_largest_runs() -> None:
    assert default_quota([]) == default_quota([POOL]) == LEAST_QUOTA
    large = replace(POOL, max_rank=128, lora_widths={"attn": 10**6, "mlp": 10**7})
    assert default_quota([POOL, large]) == 8 * 3 * 16 * 128 * 11 * 10**6


def test_a_run_counts_its_state_in_memory_and_two_copies() -> None:
    lora = LoraSpec(rank=1, seed=0)
    assert weigh_run(lora, POOL, [POOL], 7, -1) == RunWeight(3 * 177_600, 2 * 177_600, 7, 0)
    weight = weigh_run(lora, POOL, [POOL], 0, 5)
    assert weight is not None
    assert (weight.quota, weight.free_bytes) == (LEAST_QUOTA, 5)


def test_a_pool_without_sizes_of_runs_counts_none() -> None:
    silent = replace(POOL, lora_widths={})
    assert weigh_run(LoraSpec(rank=1, seed=0), silent, [silent], 1, 0) is None
