"""Sampling of a worker: claims, limits and answers, with a real store and a scripted decoder; tokens on their way to an API."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.messages.ids import RequestId, TenantId, WorkerId
from cotrain_store.messages.ops import Result
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.sampling.token_stream import StreamedTokens, TokenFeed, TokenPublisher, TokenStream
from cotrain_store.tenants.policies import Policies
from cotrain_workers.checkpoints.files import CheckpointFiles, Saved
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput, SampleRequest, StepResults
from cotrain_workers.engine.ops import Failure, HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from cotrain_workers.sampling import service
from cotrain_workers.sampling.service import MAX_CLAIMED, MAX_WAITING, UNREADABLE, WEIGHTS_LOST, SamplingService
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import BODY, LARGE_BODY, Samples, open_samples, sampler_record
from tests.support.stack import MODEL
from tests.support.waiting import until

OUTPUT = SampleOutput(
    [SampledSequence(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", None)],
    None, None, None, cached_prompt_tokens=2,
)  # fmt: skip


@dataclass
class Clock:
    """Time that a decoder spends. A grammar is the time that it takes."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now


@dataclass
class ScriptedDecoder:
    """A decoder that keeps its requests. A step finishes one request per entry of `turns`."""

    held: dict[str, SampleRequest] = field(default_factory=dict)
    turns: deque[int] = field(default_factory=deque)
    dropped: list[str] = field(default_factory=list)
    clock: Clock | None = None

    @property
    def busy(self) -> bool:
        return bool(self.held)

    @property
    def waiting(self) -> Counter[str]:
        return Counter(request.tenant for request in self.held.values())

    def refuse(self, request: SampleRequest) -> str | None:
        if self.clock and request.grammar:
            self.clock.now += float(request.grammar)
        return None

    def add(self, request: SampleRequest) -> None:
        self.held[request.id] = request

    def cancel(self, request_id: str) -> None:
        self.held.pop(request_id, None)

    def step(self) -> StepResults:
        most = self.turns.popleft() if self.turns else 0
        finished: list[tuple[str, SampleOutput | Failure]] = [(name, OUTPUT) for name in list(self.held)[:most]]
        for name, _ in finished:
            del self.held[name]
        return StepResults(finished, decoded_tokens=len(finished))

    @property
    def kv_cache_ratio(self) -> float | None:
        return None

    def drop_weights(self, key: str) -> None:
        self.dropped.append(key)


@dataclass
class Bench:
    """A service on a real store, its decoder, and the weights it knows."""

    samples: Samples
    decoder: ScriptedDecoder
    weights: WeightsStore
    service: SamplingService

    def ended(self, request: RequestId) -> Result | None:
        return self.samples.result(request)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


@pytest.fixture
async def bench(empty_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_samples(empty_redis.url, tmp_path) as samples:
        decoder = ScriptedDecoder()
        files = CheckpointFiles(Folder(tmp_path), MODEL)
        weights = WeightsStore(samples.saved, files, layout_of, 10**6, 10**6)
        publisher = TokenPublisher(samples.log.redis)
        service = SamplingService(
            decoder, ScriptedDecoder, samples.sampling, weights, publisher, (2,),  # type: ignore[arg-type]
            WorkerMetrics(MODEL, WorkerId("w0")),
        )  # fmt: skip
        yield Bench(samples, decoder, weights, service)


async def test_no_more_is_claimed_than_the_decoder_can_soon_begin(bench: Bench) -> None:
    sampler = await bench.samples.sampler()
    requests = await bench.samples.submit(sampler, *range(MAX_WAITING + 10))
    assert not bench.service.advance()
    assert bench.samples.load()[:2] == (10, MAX_WAITING)
    bench.decoder.turns.append(4)
    assert bench.service.advance()
    assert bench.service.waiting == MAX_WAITING - 4
    assert all(bench.ended(request) for request in requests[:4])
    bench.service.advance()
    assert bench.samples.load()[:2] == (6, MAX_WAITING)


async def test_another_tenant_is_claimed_for_however_many_requests_of_others_wait_here(bench: Bench) -> None:
    others = [await bench.samples.sampler(f"other{at}") for at in range(17)]
    for other in others:
        await bench.samples.submit(other, *range(MAX_WAITING + 1))
    bench.service.advance()
    assert bench.service.waiting == MAX_CLAIMED
    (request,) = await bench.samples.submit(await bench.samples.sampler("newcomer"), 0)

    bench.service.advance()

    assert request in bench.decoder.held


async def test_grammars_of_a_tenant_take_at_most_a_tenth_of_the_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.decoder.clock = clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    hostile, quiet = [await bench.samples.sampler(tenant) for tenant in ("hostile", "quiet")]
    submit = bench.samples.intake.submit
    for seq in range(3):
        await submit(hostile, seq, replace(BODY, grammar="0.3"))
    bench.service.advance()
    assert len(bench.decoder.held) == 1  # the others wait for the pause after the first
    plain = await submit(hostile, 3, BODY)
    cheap = [await submit(quiet, seq, replace(BODY, grammar="0.0005")) for seq in range(2)]
    clock.now += 1.0
    bench.service.advance()
    assert {plain, *cheap} <= bench.decoder.held.keys()
    assert len(bench.decoder.held) == 4
    clock.now += 1.71
    bench.service.advance()
    assert len(bench.decoder.held) == 5
    assert bench.service.running == 6


async def test_a_claimed_request_has_the_weight_of_its_tenant(bench: Bench) -> None:
    policies = Policies(bench.samples.log.connection)
    await policies.set_weight(TenantId("heavy"), 2.5)
    weights = {}
    for tenant in ("heavy", "any"):
        (request,) = await bench.samples.submit(await bench.samples.sampler(tenant), 0)
        bench.service.advance()
        weights[tenant] = bench.decoder.held[request].tenant_weight
    assert weights == {"heavy": 2.5, "any": 1.0}


async def test_a_decoder_that_got_nothing_done_says_so(bench: Bench) -> None:
    sampler = await bench.samples.sampler()
    await bench.samples.submit(sampler, 1)
    assert not bench.service.advance()
    assert bench.service.running == 1
    bench.decoder.turns.append(1)
    assert bench.service.advance()
    assert bench.service.running == 0


async def test_a_request_waits_aside_until_its_lost_weights_are_made_again(bench: Bench) -> None:
    run = await bench.samples.log.new_run()
    _, saves = await bench.samples.save(run, 1, sampler=3)
    ref = saves[run.id, 1].weights.ref
    bench.weights.reload()
    sampler = sampler_record("a", 3, ref, ephemeral=True)
    (held,) = await bench.samples.submit(sampler, 1)
    (other,) = await bench.samples.submit(await bench.samples.sampler("b"), 1)
    bench.service.advance()
    assert list(bench.decoder.held) == [other]
    assert bench.service.running == 2
    spec = AdapterSpec(rank=1, seed=0)
    bench.weights.put_again(ref, Saved(HostWeights(spec, torch.zeros(layout_of(spec).size))))
    bench.service.advance()
    assert list(bench.decoder.held) == [other, held]
    assert bench.decoder.held[held].weights == ref


async def test_weights_and_bodies_that_are_gone_fail_who_needs_them(bench: Bench, tmp_path: Path) -> None:
    base = await bench.samples.sampler("a")
    unread = await bench.samples.intake.submit(base, 1, LARGE_BODY)
    for segment in (tmp_path / "spool").iterdir():
        segment.unlink()
    run = await bench.samples.log.new_run("b")
    _, saves = await bench.samples.save(run, 1, sampler=3)
    ref = saves[run.id, 1].weights.ref
    bench.weights.give_up(ref)
    (gone,) = await bench.samples.submit(sampler_record("b", 3, ref, ephemeral=True), 1)
    bench.service.advance()
    for request, failure in ((unread, UNREADABLE), (gone, WEIGHTS_LOST)):
        result = bench.ended(request)
        assert result is not None
        assert result.json() == {"error": failure.message, "category": failure.category}
    assert not bench.decoder.held


async def test_a_cancelled_request_leaves_wherever_it_is(bench: Bench) -> None:
    run = await bench.samples.log.new_run()
    _, saves = await bench.samples.save(run, 1, sampler=3)
    bench.weights.reload()
    aside = sampler_record("a", 3, saves[run.id, 1].weights.ref, ephemeral=True)
    requests = [*await bench.samples.submit(aside, 1), *await bench.samples.submit(await bench.samples.sampler("b"), 1)]
    bench.service.advance()
    for request in requests:
        tenant = TenantId("a" if "of-a" in request else "b")
        await bench.samples.intake.cancel(tenant, request)
    bench.service.advance()
    assert bench.service.running == 0
    assert not bench.decoder.held
    assert [bench.ended(request) for request in requests] == [CANCELLED, CANCELLED]


async def test_what_has_ended_is_answered_before_the_rest_is_given_back(bench: Bench) -> None:
    sampler = await bench.samples.sampler()
    first, second = await bench.samples.submit(sampler, 1, 2)
    bench.service.advance()
    bench.service._finish(first, OUTPUT)
    bench.service.drain()
    assert bench.ended(first) is not None
    assert bench.ended(second) is None
    assert bench.samples.load()[:2] == (1, 0)
    assert bench.samples.log.redis.hget(redis_keys.sample(second), "starts") in (None, b"0")


async def test_a_full_disk_delays_answers_and_claims_and_loses_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("cotrain_workers.sampling.service.RETRY_S", 0.0)
    sampler = await bench.samples.sampler()
    requests = await bench.samples.submit(sampler, *range(MAX_WAITING + 1))
    bench.service.advance()
    bench.decoder.turns.append(3)
    with monkeypatch.context() as broken:
        broken.setattr(bench.samples.sampling, "resolve", full)
        bench.service.advance()
        bench.service.advance()
        assert bench.samples.load()[:2] == (1, MAX_WAITING)
    bench.service.advance()
    assert all(bench.ended(request) for request in requests[:3])
    assert bench.samples.load()[:2] == (0, MAX_WAITING - 2)


async def test_device_copies_of_forgotten_weights_are_dropped(bench: Bench) -> None:
    bench.service.forget(["r:1", "r:2"])
    assert bench.decoder.dropped == ["r:1", "r:2"]


async def test_what_a_request_took_is_counted_once_for_its_tenant(bench: Bench) -> None:
    sampler = await bench.samples.sampler()
    await bench.samples.submit(sampler, 1, 2)
    bench.decoder.turns.extend([1, 1])
    for _ in range(3):
        bench.service.advance()
    redis = bench.samples.log.redis
    (hour,) = redis.scan_iter("cotrain:usage:a:*")
    used = {field.split(b"|")[0]: int(amount) for field, amount in redis.hgetall(hour).items()}
    assert used == {b"prefill_tokens": 2 * 3, b"cached_tokens": 2 * 2, b"sampled_tokens": 2}


REQUEST, OTHER = RequestId("s:sample:0:1"), RequestId("s:sample:0:2")
FIRST = StreamedTokens(0, 0, (5, 6), (-0.5, -1.25))
SECOND = StreamedTokens(1, 2, (7,), (-3e-9,))
PATIENCE_S = 120.0


async def listened_to(samples: Samples) -> None:
    channel = redis_keys.notify_tokens()
    await until(lambda: samples.log.redis.pubsub_numsub(channel) == [(channel.encode(), 1)])


async def read(feed: TokenFeed, count: int) -> list[StreamedTokens]:
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in feed:
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_who_follows_a_request_gets_its_tokens_to_the_last_bit(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed, stream.follow(REQUEST) as same:
            publisher.publish(OTHER, [SECOND])
            publisher.publish(REQUEST, [FIRST, SECOND])
            publisher.publish(REQUEST, [FIRST])
            assert await read(feed, 3) == await read(same, 3) == [FIRST, SECOND, FIRST]


async def test_a_closed_feed_ends_after_what_has_come(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed, stream.follow(REQUEST) as witness:
            publisher.publish(REQUEST, [FIRST])
            await read(witness, 1)
            feed.close()
            feed.close()
            assert [event async for event in feed] == [FIRST]


async def test_every_feed_ends_with_its_process(samples: Samples) -> None:
    stream = TokenStream(samples.log.connection)
    async with stream:
        manager = stream.follow(REQUEST)
        feed = manager.__enter__()
    assert [event async for event in feed] == []
    manager.__exit__(None, None, None)


async def test_one_who_reads_slowly_loses_tokens_and_nobody_waits_for_it(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.sampling.token_stream.MAX_UNREAD", 2)
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as slow, stream.follow(OTHER) as witness:
            publisher.publish(REQUEST, [FIRST, FIRST, SECOND])
            publisher.publish(OTHER, [SECOND])
            await read(witness, 1)
            slow.close()
            assert [event async for event in slow] == [FIRST, FIRST]


async def test_a_new_subscription_goes_on(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed:
            samples.log.redis.execute_command("CLIENT KILL TYPE pubsub")
            await listened_to(samples)
            publisher.publish(REQUEST, [SECOND])
            assert await read(feed, 1) == [SECOND]
