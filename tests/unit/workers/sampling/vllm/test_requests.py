"""Sample requests while a vLLM server is unavailable, refuses them or fails on them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from cotrain_workers.engine.ops import Failure
from cotrain_workers.sampling.vllm import requests as vllm_sampler
from cotrain_workers.sampling.vllm.decoder import VllmDecoder
from cotrain_workers.sampling.vllm.requests import KEPT_SHARE, TenantEntry
from tests.support.fake_vllm import FakeVllm
from tests.support.vllm_requests import PROMPT, finish, request, run, the_only, tokens

NewDecoder = Callable[..., VllmDecoder]


def test_a_server_that_restarts_during_requests_loses_nothing(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    requests = [request(f"r{n}", f"run-{n % 5}", seed=n) for n in range(10)]
    decoder = new_decoder()
    undisturbed = run(decoder, *requests)
    vllm.may_generate.clear()
    for each in requests:
        decoder.add(each)
    vllm.wait_until(generating=10)
    vllm.stop()
    decoder.step()
    assert decoder.busy
    vllm.may_generate.set()
    vllm.start()
    outputs = finish(decoder)
    assert {name: tokens(output) for name, output in outputs.items()} == {
        name: tokens(output) for name, output in undisturbed.items()
    }


def test_requests_wait_for_a_server_that_is_not_up_yet(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    vllm.stop()
    decoder = new_decoder()
    decoder.add(request())
    assert not decoder.step().finished
    assert decoder.waiting.total() == 1
    vllm.start()
    assert len(the_only(finish(decoder)["q"]).tokens) == 6
    assert decoder.waiting.total() == 0


def test_a_refused_request_fails_alone_with_the_words_of_the_server(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    vllm.max_logprobs = 5
    outputs = run(new_decoder(), request("many", topk_sample_logprobs=6), request("few"))
    assert outputs["many"] == Failure("The sampler refused this: Requested more logprobs than the allowed 5.", "user")
    assert tokens(outputs["few"])


def test_a_failed_sequence_ends_the_other_sequences_of_its_request(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))

    def refuse() -> tuple[int, object]:
        vllm.wait_until(generating=3)
        return 400, {"error": {"message": "No."}}

    vllm.answers["/v1/completions"] = [refuse]
    vllm.may_generate.clear()
    outputs = run(decoder, request("bad", num_samples=4))
    assert outputs == {"bad": Failure("The sampler refused this: No.", "user")}
    vllm.wait_until(generating=0, aborted=3)
    vllm.may_generate.set()
    assert tokens(run(decoder, request("next"))["next"])


def test_a_request_to_a_busy_server_is_retried_until_it_is_accepted(
    new_decoder: NewDecoder, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "TRIES", 2)
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.fails[99] = [(503, "starting")] * 4
    assert tokens(run(decoder, request(prompt=np.array([5, 99, 5])))["q"])
    assert vllm.fails[99] == []


def test_a_transient_error_is_retried(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    undisturbed = run(decoder, request())["q"]
    vllm.answers["/v1/completions"] = [(500, "oops"), (503, "busy"), (429, "busy")]
    assert tokens(run(decoder, request())["q"]) == tokens(undisturbed)


def test_a_request_that_always_fails_on_the_server_fails_alone(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    vllm.fails[99] = [(500, {"error": {"message": "Internal server error"}})] * 8
    poisoned = request("poisoned", prompt=np.array([5, 99, 5]))
    outputs = run(new_decoder(), poisoned, request("sound"))
    assert outputs["poisoned"] == vllm_sampler.BROKEN
    assert tokens(outputs["sound"])


def test_an_unreadable_answer_fails_its_request_alone(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.answers["/v1/completions"] = [(200, {"choices": []})]
    assert run(decoder, request("bad"))["bad"] == vllm_sampler.BROKEN
    assert tokens(run(decoder, request("good"))["good"])


def test_a_key_refused_later_does_not_fail_the_requests(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.api_key = "changed"
    accepted = len(vllm.calls)
    decoder.add(request())
    vllm.wait_until(calls=accepted + 3)
    assert not decoder.step().finished
    vllm.api_key = ""
    assert tokens(finish(decoder)["q"])


@pytest.mark.parametrize("unembedding", ["refused", "ignored"])
def test_an_adapter_with_an_unsupported_unembedding_is_refused(
    new_decoder: NewDecoder, vllm: FakeVllm, unembedding: str
) -> None:
    vllm.unembedding = unembedding
    outputs = run(new_decoder(), request("head", "run-0"), request("body", "run-1"))
    assert outputs["head"] == vllm_sampler.UNEMBEDDING
    assert tokens(outputs["body"])


def test_a_request_that_can_never_run_is_refused_in_words(new_decoder: NewDecoder) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))  # from here on the context length of the server is known
    long = decoder.refuse(request(prompt=np.ones(64, np.int64)))
    assert long == "The prompt has 64 tokens; the context holds 64, one of them generated."
    foreign = decoder.refuse(request(target_prompt_logprobs=PROMPT[1:, None] + 1))
    assert foreign is not None
    assert foreign.startswith("target_prompt_logprobs: ")


def test_a_too_long_prompt_is_refused_once_the_server_is_reachable(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    vllm.stop()
    decoder = new_decoder()
    long = request("long", prompt=np.ones(65, np.int64))
    assert decoder.refuse(long) is None
    decoder.add(long)
    vllm.start()
    output = finish(decoder)["long"]
    assert isinstance(output, Failure)
    assert output.category == "user"
    assert "65 tokens" in output.message


PLACES = 2 * KEPT_SHARE
"""Two of them are reserved."""


class Guests:
    """Sequences that stay until `leave` is called."""

    def __init__(self) -> None:
        self.entry = TenantEntry(PLACES)
        self.inside: list[str] = []
        self._leave: dict[str, list[asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def come(self, tenant: str, count: int) -> None:
        self._tasks += [asyncio.create_task(self._stay(tenant)) for _ in range(count)]
        await settled()

    async def leave(self, tenant: str) -> None:
        self._leave[tenant].pop(0).set()
        await settled()

    async def _stay(self, tenant: str) -> None:
        async with self.entry.of(tenant):
            self.inside.append(tenant)
            leave = asyncio.Event()
            self._leave.setdefault(tenant, []).append(leave)
            await leave.wait()
        self.inside.remove(tenant)

    async def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_enters_at_once_next_to_a_tenant_with_hundreds() -> None:
    guests = Guests()
    await guests.come("heavy", 300)
    assert Counter(guests.inside) == {"heavy": PLACES - 2}

    await guests.come("light", 1)
    await guests.come("other", 1)

    assert Counter(guests.inside) == {"heavy": PLACES - 2, "light": 1, "other": 1}
    await guests.cancel_all()


async def test_places_go_to_the_tenant_with_the_fewest() -> None:
    guests = Guests()
    await guests.come("heavy", 300)
    await guests.come("light", 100)
    for _ in range(2 * PLACES):
        await guests.leave("heavy")

    assert Counter(guests.inside)["light"] >= PLACES // 2 - 1
    assert len(guests.inside) == PLACES - 2 + 1 or len(guests.inside) == PLACES - 2
    await guests.cancel_all()


async def test_a_cancelled_sequence_keeps_no_place() -> None:
    guests = Guests()
    await guests.come("a", 100)
    await guests.cancel_all()
    again = Guests()
    again.entry = guests.entry

    await again.come("b", 100)

    assert len(again.inside) == PLACES - 2
    await again.cancel_all()
