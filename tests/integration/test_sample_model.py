"""The scripts of sampling against a plain model of them, step by step, on a real Redis (hypothesis).

The model has a queue for each tenant, the requests of each worker, the first result of each request, and
the order in which each client's requests ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.errors import Fenced, Reason, SeqConflict
from cotrain_store.messages.ids import CLONE_SIZE, RequestId, TenantId, sample_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import SamplerRecord
from cotrain_store.tenants.quotas import Quotas
from tests.support.draws import examples
from tests.support.log import WORKER
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.samples import BODY, LARGE_BODY, Samples, open_samples, sampler_record
from tests.support.stack import POOL

TENANTS = ("t0", "t1", "t2")
MAX_HELD = 6
#: Two copies of one client: the second counts from its own start.
SEQS = st.integers(0, 9) | st.integers(CLONE_SIZE, CLONE_SIZE + 3)
#: The first sampler of a tenant is of the base model, the second of weights that only w0 has.
SAMPLERS = st.tuples(st.sampled_from(TENANTS), st.sampled_from([0, 1]))

Client = tuple[str, int]


@dataclass
class Model:
    """Expected state of all sample requests of a pool."""

    accepted: dict[RequestId, SampleBody] = field(default_factory=dict)
    ring: list[str] = field(default_factory=list)
    waiting: dict[tuple[str, str], list[RequestId]] = field(default_factory=dict)
    """By tenant and lane."""
    running: list[RequestId] = field(default_factory=list)
    cancelled: set[RequestId] = field(default_factory=set)
    results: dict[RequestId, Result] = field(default_factory=dict)
    ended: dict[Client, list[RequestId]] = field(default_factory=dict)
    """By sampler and copy of its client."""

    def lanes(self, tenant: str) -> list[list[RequestId]]:
        """Return a tenant's queues in the order in which w0 claims from them."""
        return [self.waiting.setdefault((tenant, lane), []) for lane in (WORKER, redis_keys.ANY_WORKER)]

    def held(self, tenant: str) -> int:
        mine = [request for request in self.running if tenant_of(request) == tenant]
        return sum(map(len, self.lanes(tenant))) + len(mine)

    def wait(self, request: RequestId, *, first: bool = False) -> None:
        tenant = tenant_of(request)
        place = 0 if first else len(self.lanes(tenant)[lane_of(request)])
        self.lanes(tenant)[lane_of(request)].insert(place, request)
        if tenant not in self.ring:
            self.ring.insert(0 if first else len(self.ring), tenant)

    def claim(self, most: int) -> list[RequestId]:
        taken: list[RequestId] = []
        while self.ring and len(taken) < most:
            tenant = self.ring.pop(0)
            lanes = self.lanes(tenant)
            taken.append((lanes[0] or lanes[1]).pop(0))
            if any(lanes):
                self.ring.append(tenant)
        self.running += taken
        return taken

    def end(self, request: RequestId, result: Result) -> None:
        if request in self.results:
            return
        tenant = tenant_of(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.lanes(tenant)[lane_of(request)].remove(request)
            if not any(self.lanes(tenant)):
                self.ring.remove(tenant)
        self.cancelled.discard(request)
        self.results[request] = result
        self.ended.setdefault(client_of(request), []).append(request)

    def put_back(self) -> None:
        for request in list(self.cancelled):
            self.end(request, CANCELLED)
        for request in reversed(self.running):
            self.wait(request, first=True)
        self.running.clear()


def tenant_of(request: RequestId) -> str:
    return request.removeprefix("session-of-").partition(":")[0]


def lane_of(request: RequestId) -> int:
    return 0 if ":sample:1:" in request else 1


def client_of(request: RequestId) -> Client:
    sampler, _, seq = request.rpartition(":")
    return sampler, int(seq) // CLONE_SIZE


class SampleMachine(RuleBasedStateMachine):
    """Drive intake, worker and polls; after every step the store equals the model."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.server.flush()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.stack = contextlib.AsyncExitStack()
        limits = Quotas(samples=MAX_HELD)
        opened = open_samples(self.server.url, Path(self.folder.name), limits)
        self.samples: Samples = self.wait(self.stack.enter_async_context(opened))
        self.completions = self.samples.completions()
        self.sampling = self.samples.sampling
        self.model = Model()
        self.cursors: dict[Client, int] = {}
        self.told: dict[Client, list[RequestId]] = {}
        self.samplers: dict[tuple[str, int], SamplerRecord] = {}
        for tenant in TENANTS:
            run = self.wait(self.samples.log.new_run(tenant))
            self.wait(self.samples.save(run, 1, sampler=1))
            fresh = self.samples.records.sampler(run.tenant, sampler_record(tenant, 1).id)
            self.samplers[tenant, 1] = self.wait(fresh)
            self.samplers[tenant, 0] = self.wait(self.samples.sampler(tenant, 0))

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    @rule(whose=SAMPLERS, seq=SEQS, content=st.sampled_from([BODY, LARGE_BODY, replace(BODY, seed=1)]))
    def submit(self, whose: tuple[str, int], seq: int, content: SampleBody) -> None:
        sampler = self.samplers[whose]
        request = sample_id(sampler.id, seq)
        known = self.model.accepted.get(request)
        call = self.samples.intake.submit(sampler, seq, content)
        if known is not None and known != content:
            with pytest.raises(SeqConflict):
                self.wait(call)
        elif known is None and self.model.held(sampler.tenant) >= MAX_HELD:
            with refused(Reason.SAMPLING_BUSY):
                self.wait(call)
        else:
            assert self.wait(call) == request
            if known is None:
                self.model.accepted[request] = content
                self.model.wait(request)

    @rule(most=st.integers(0, 5))
    def claim(self, most: int) -> None:
        expected = self.model.claim(most)
        claimed = self.sampling.claim(most)
        assert [one.request for one in claimed] == expected
        bodies = [one.body and replace(one.body, policy_step=None) for one in claimed]
        assert bodies == [self.model.accepted[one] for one in expected]

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), twice=st.booleans())
    def resolve(self, data: st.DataObject, twice: bool) -> None:
        """Resolve a running request in most cases, else a queued or resolved one, as a faulty worker might."""
        likely = st.sampled_from(self.model.running or sorted(self.model.accepted))
        anything = st.sampled_from(sorted(self.model.accepted))
        chosen = data.draw(st.lists(likely | anything, min_size=1, max_size=4, unique=True))
        failed = data.draw(st.booleans())
        number = str(len(self.model.results))
        result = Result.failed(number, "server") if failed else Result(ResultKind.SAMPLE, number.encode())
        for _ in range(1 + twice):
            self.sampling.resolve(dict.fromkeys(chosen, result), {"sample_requests": 1})
        for request in chosen:
            self.model.end(request, result)

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), foreign=st.booleans())
    def cancel(self, data: st.DataObject, foreign: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.model.accepted)))
        tenant = TenantId("stranger" if foreign else tenant_of(request))
        self.wait(self.samples.intake.cancel(tenant, request))
        if foreign or request in self.model.results:
            return
        if request in self.model.running:
            self.model.cancelled.add(request)
        else:
            event("cancelled while waiting")
            self.model.end(request, CANCELLED)

    @rule()
    def stop_what_was_cancelled(self) -> None:
        cancelled = self.sampling.cancelled()
        assert cancelled == sorted(self.model.cancelled)
        self.sampling.resolve(dict.fromkeys(cancelled, CANCELLED), {})
        for request in cancelled:
            self.model.end(request, CANCELLED)

    @rule()
    def give_back(self) -> None:
        self.sampling.give_back()
        self.model.put_back()

    @rule()
    def a_replaced_worker_resolves_nothing_and_its_successor_runs_it_again(self) -> None:
        old, self.sampling = self.sampling, self.samples.new_worker()
        results = dict.fromkeys(self.model.running, Result.failed("old", "server"))
        with pytest.raises(Fenced):
            old.resolve(results, {"sample_requests": 1})
        with pytest.raises(Fenced):
            old.claim(1)
        before = len(self.model.running) - len(self.model.cancelled)
        assert self.sampling.requeue() == before
        self.model.put_back()

    @rule(whose=SAMPLERS, clone=st.integers(0, 1), is_answer_lost=st.booleans())
    def poll(self, whose: tuple[str, int], clone: int, is_answer_lost: bool) -> None:
        sampler = self.samplers[whose]
        client = (sampler.id, clone)
        told = self.told.setdefault(client, [])
        after = self.cursors.get(client, 0)
        ended, cursor = self.wait(self.completions.wait(sampler, clone, after, 0.0))
        new = self.model.ended.get(client, [])[len(told) :]
        assert [one.request for one in ended] == new
        for one in ended:
            result = self.model.results[one.request]
            assert one.failed == (result.kind is ResultKind.FAILURE)
            assert one.size == len(result.payload)
        if not is_answer_lost:
            told += new
            self.cursors[client] = cursor

    @invariant()
    def the_store_equals_the_model(self) -> None:
        redis, model = self.samples.log.redis, self.model
        ring = [tenant.decode() for tenant in redis.lrange(redis_keys.sample_ring(POOL), 0, -1)]
        assert ring == model.ring
        running = redis.lrange(redis_keys.claimed_samples(POOL, WORKER), 0, -1)
        assert [request.decode() for request in running] == model.running
        for tenant in TENANTS:
            waiting = sum(map(len, model.lanes(tenant)))
            load = self.samples.load(tenant)
            assert load[:2] == (waiting, model.held(tenant) - waiting)
            assert (load[2] == 0) == (load[:2] == (0, 0))
        for request in model.accepted:
            assert self.samples.result(request) == model.results.get(request)

    @invariant()
    def every_spooled_body_in_need_is_referenced_once(self) -> None:
        unresolved = self.model.accepted.keys() - self.model.results.keys()
        large = [request for request in unresolved if self.model.accepted[request] == LARGE_BODY]
        assert sum(self.samples.log.references().values()) == len(large)

    def everything_ends(self) -> None:
        """Whatever happened before: each accepted request ends once, and its client hears of it."""
        self.give_back()
        while claimed := self.sampling.claim(3):
            self.model.claim(3)
            self.resolve_all(one.request for one in claimed)
        assert self.model.results.keys() == self.model.accepted.keys()
        for whose in self.samplers:
            for clone in (0, 1):
                self.poll(whose, clone, False)
        told = [request for requests in self.told.values() for request in requests]
        assert sorted(told) == sorted(self.model.accepted)
        self.the_store_equals_the_model()

    def resolve_all(self, requests: Iterable[RequestId]) -> None:
        results = {request: Result(ResultKind.SAMPLE, b"end") for request in requests}
        self.sampling.resolve(results, {})
        for request, result in results.items():
            self.model.end(request, result)

    @override
    def teardown(self) -> None:
        if hasattr(self, "samplers"):
            try:
                self.everything_ends()
            finally:
                self.wait(self.stack.aclose())
                self.loop.close()
                self.folder.cleanup()


def test_sampling_behaves_like_its_model(redis_server: EmbeddedRedis) -> None:
    SampleMachine.server = redis_server
    run_state_machine_as_test(
        SampleMachine, settings=settings(max_examples=examples(24, at_least=8), stateful_step_count=40, deadline=None)
    )
