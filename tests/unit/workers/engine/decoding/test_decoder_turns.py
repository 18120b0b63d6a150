"""Running and waiting requests in the decoder: preemption, cancellation, scarce memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.slot_pool import slot_layout
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, plan_layout
from tests.support.decoding import (
    RUNS,
    Result,
    assert_all_same,
    assert_nothing_is_held,
    assert_same,
    decoder_of,
    finish,
    neighbours,
    output,
    request,
    trained_weights,
    whole,
)
from tests.support.training import MIX, NewEngine


def test_preemption_changes_no_bit(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [
        request(f"r{at}", np.arange(at, at + 30), RUNS[at % 3], max_tokens=40, seed=at, num_samples=2)
        for at in range(6)
    ]
    roomy = finish(decoder_of(engine, weights), requests)
    tight = decoder_of(engine, weights, kv_tokens=16 * 16)

    found = finish(tight, requests)

    assert tight.preemptions > 5
    assert_all_same(found, roomy)


def test_other_tenants_change_no_bit_while_pages_are_preempted(new_engine: NewEngine) -> None:
    """Compare each request alone in a large decoder with all together in a small one, where tenants preempt each other."""
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [
        request(
            f"r{at}", np.arange(at, at + 30), [None, *RUNS][at % 4], max_tokens=24, seed=at,
            num_samples=1 + at % 3, stop_strings=("never", "zzzz"), tenant=f"t{at % 3}",
            topk_sample_logprobs=2 * (at % 2), prompt_logprobs=at % 2 == 0,
        )
        for at in range(7)
    ]  # fmt: skip
    alone = {each.id: output(decoder_of(engine, weights), each) for each in requests}
    tight = decoder_of(engine, weights, kv_tokens=16 * 16)

    for each in requests[:5]:
        tight.add(each)
    together: dict[str, Result] = {}
    for _ in range(24):
        together.update(tight.step().finished)
    together.update(finish(tight, requests[5:]))

    assert tight.preemptions > 5
    assert_all_same(together, alone)


def test_earlier_contents_of_memory_change_no_result(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    requests = [
        request(f"r{at}", np.arange(at, at + 7 * at + 1), RUNS[at % 3], max_tokens=20, num_samples=3) for at in range(4)
    ]
    expected = finish(decoder_of(engine, weights), requests)
    decoder = decoder_of(engine, weights)
    for layer in range(len(decoder._cache._keys)):
        for memory in decoder._cache.paged(layer):
            memory[: decoder._cache.dump] = float("nan")

    found = finish(decoder, requests)

    assert_all_same(found, expected)


def test_a_newcomer_next_to_long_sequences_needs_two_more_steps(new_engine: NewEngine) -> None:
    """20 requests of 64 samples are 1,280 sequences, with memory for 10 of them."""
    decoder = decoder_of(new_engine(), {}, kv_tokens=16 * 100)
    for at in range(20):
        decoder.add(request(f"h{at}", [at], num_samples=64, max_tokens=150, tenant="heavy"))
    for _ in range(100):
        decoder.step()
    newcomer = request("new", [1, 2, 3], max_tokens=8, tenant="light")
    decoder.add(newcomer)

    steps = 1
    while "new" not in [name for name, _ in decoder.step().finished]:
        steps += 1

    assert decoder.preemptions > 0
    assert steps <= 8 + 2


def test_a_tenant_with_every_slot_of_weights_in_use_yields_one_to_another(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    slot_bytes = 4 * slot_layout(engine.targets, 8).size
    small = [tenant.run for tenant in MIX if weights[tenant.run].spec.rank <= 8]
    assert len(small) > 3
    decoder = engine.decoder(
        weights.__getitem__, kv_tokens=4096, text=None, page_tokens=16, weights_bytes=3 * slot_bytes
    )
    for at, run in enumerate(small[:3]):
        decoder.add(request(f"h{at}", [at], run, max_tokens=200, tenant="heavy"))
    for _ in range(5):
        decoder.step()
    decoder.add(request("new", [1, 2, 3], small[3], max_tokens=8, tenant="light"))

    steps = 1
    while "new" not in [name for name, _ in decoder.step().finished]:
        steps += 1

    assert decoder.preemptions == 1
    assert steps <= 8 + 2


def test_a_tenant_waits_for_no_slot_of_another_rank_class(new_engine: NewEngine) -> None:
    """One tenant's requests for adapters of rank 16 always exceed the slots."""
    engine = new_engine()
    mine = trained_weights(engine)["all-8"]
    spec = AdapterSpec(16, seed=9)
    many = {f"m{at}": HostWeights(spec, torch.randn(plan_layout(spec, engine.targets).size) / 50) for at in range(12)}
    room = 4 * 4 * slot_layout(engine.targets, 16).size  # four slots

    def decoder() -> EngineDecoder:
        return engine.decoder(
            {**many, "mine": mine}.__getitem__,
            kv_tokens=4096, text=None, page_tokens=16, weights_bytes=room,
        )  # fmt: skip

    light = [request(f"l{at}", [1, 2, at], "mine", max_tokens=8, tenant="light") for at in range(5)]
    heavy = [request(f"h{at}", [at], f"m{at % 12}", max_tokens=5 + at % 7, tenant="heavy") for at in range(36)]
    alone = {each.id: output(decoder(), each) for each in (*light, heavy[0], heavy[13])}
    shared = decoder()
    for each in heavy:
        shared.add(each)
    found: dict[str, Result] = {}
    for each in light:
        for _ in range(3):
            found.update(shared.step().finished)
        shared.add(each)
        steps = 0
        while each.id not in found:
            found.update(shared.step().finished)
            steps += 1
        assert steps <= 8 + 2
    assert shared.busy
    found.update(finish(shared, []))

    assert len(found) == len(light) + len(heavy)
    assert_all_same(found, alone)


def test_weights_that_wait_for_a_slot_are_not_loaded_at_every_step(new_engine: NewEngine) -> None:
    """Many tenants, each with its own adapter, share three slots. A load may be a read from disk."""
    engine = new_engine()
    weights = trained_weights(engine)
    mine, loads = weights["all-8"], list[str]()

    def load(key: str) -> HostWeights:
        loads.append(key)
        return mine

    room = 3 * 4 * slot_layout(engine.targets, 8).size  # three slots
    decoder = engine.decoder(load, kv_tokens=4096, text=None, page_tokens=16, weights_bytes=room)
    tenants = [f"t{at}" for at in range(12)]
    for at, tenant in enumerate(tenants):
        decoder.add(request(tenant, [1, at], tenant, max_tokens=16, tenant=tenant))

    found = finish(decoder, [])

    assert set(found) == set(tenants)
    assert len(loads) <= 2 * len(tenants)  # once for the rank, once for the slot


def test_the_oldest_request_is_never_preempted(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {}, kv_tokens=16 * 10)
    decoder.add(request("old", np.arange(40), max_tokens=100))
    for at in range(8):
        decoder.add(request(f"young-{at}", np.arange(at, at + 20), max_tokens=60))

    steps = 0
    while "old" not in [name for name, _ in decoder.step().finished]:
        steps += 1

    assert steps == 99
    assert decoder.preemptions > 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_cancelling_frees_everything_at_any_moment(new_engine: NewEngine, overlaps: bool) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = replace(whole("mine", "all-5"), max_tokens=6)
    alone = output(decoder_of(engine, weights), mine)
    decoder = decoder_of(engine, weights, kv_tokens=16 * 14)
    decoder.overlaps = overlaps
    for steps in range(0, 14, 2):
        requests = [*neighbours(seed=steps, count=9), mine]
        for each in requests:
            decoder.add(each)
        for _ in range(steps):
            decoder.step()

        for each in requests:
            decoder.cancel(each.id)

        assert not decoder.busy
        assert decoder.waiting.total() == 0
        assert_nothing_is_held(decoder)
        assert_same(output(decoder, mine), alone)  # same name as a request whose token may be in flight
    decoder.cancel("unknown")


def test_waiting_counts_requests_that_have_not_begun(new_engine: NewEngine) -> None:
    decoder = decoder_of(new_engine(), {}, kv_tokens=16 * 4)
    for at in range(3):
        decoder.add(request(f"r{at}", np.arange(at, at + 40)))
    assert decoder.waiting.total() == 3

    decoder.step()

    assert decoder.waiting.total() == 2
