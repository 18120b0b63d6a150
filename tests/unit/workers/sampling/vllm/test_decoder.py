"""vLLM decoder over real HTTP, with a small server that computes with a tiny real model.

The server is also unavailable, refuses requests, or fails on them.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from cotrain_workers.engine.ops import Failure
from cotrain_workers.sampling.vllm import decoder as vllm_sampler
from cotrain_workers.sampling.vllm.decoder import KEPT_SHARE, TenantEntry, VllmDecoder, _abort_all
from tests.support.fake_vllm import FakeVllm
from tests.support.vllm_requests import PROMPT, Trained, finish, request, run, sampled, steps, the_only, tokens

NewDecoder = Callable[..., VllmDecoder]


@pytest.mark.parametrize("name", ["run-0", "run-1", "run-2", "run-3", "run-4"])
def test_logprobs_of_a_trained_adapter_equal_those_of_the_trainer(
    new_decoder: NewDecoder, trained: Trained, name: str
) -> None:
    output = run(new_decoder(), request(weights=name, prompt_logprobs=True))["q"]
    sequence = the_only(output)
    whole = [*PROMPT.tolist(), *sequence.tokens.tolist()]
    theirs = trained.logprobs(name, whole)
    own_prompt = sampled(output).prompt_logprobs
    assert own_prompt is not None
    assert np.isnan(own_prompt[0])
    ours = np.concatenate([own_prompt[1:], sequence.logprobs])
    assert np.abs(ours - theirs).max() < 1e-5  # fp32, other orders of summation


def test_adapters_differ_from_the_base_and_from_one_another(new_decoder: NewDecoder) -> None:
    names = [None, "run-0", "run-1", "run-2"]
    outputs = run(new_decoder(), *(request(str(name), name, prompt_logprobs=True) for name in names))
    scores = [sampled(outputs[str(name)]).prompt_logprobs for name in names]
    assert len({tuple(each[1:]) for each in scores if each is not None}) == len(names)


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_others(new_decoder: NewDecoder) -> None:
    mine = request("mine", "run-1", num_samples=3, seed=5)
    others = [request(f"o{n}", f"run-{n % 5}", seed=n) for n in range(10)]
    alone = run(new_decoder(), mine)["mine"]
    among = run(new_decoder(max_adapters=2), *others[:5], mine, *others[5:])["mine"]
    assert tokens(alone) == tokens(among)
    assert len({tuple(each) for each in tokens(alone)}) == 3


def test_sequences_of_neighbouring_seeds_are_independent(new_decoder: NewDecoder) -> None:
    one, two = (request(f"s{seed}", num_samples=4, seed=seed) for seed in (1, 2))
    outputs = run(new_decoder(), one, two)
    drawn = [tuple(each) for name in ("s1", "s2") for each in tokens(outputs[name])]
    assert len(set(drawn)) == 8


def test_the_stop_token_is_returned_and_ends_the_sequence(new_decoder: NewDecoder) -> None:
    free = the_only(run(new_decoder(), request())["q"])
    assert free.stop_reason == "length"
    stop = int(free.tokens[2])
    first = free.tokens.tolist().index(stop)
    stopped = the_only(run(new_decoder(), request(stop_tokens=frozenset({stop})))["q"])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.stop_reason == "stop"


def test_the_tokens_that_complete_a_stop_string_are_returned(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    free = the_only(run(decoder, request())["q"]).tokens.tolist()
    texts = [vllm.text(free[:length]) for length in range(len(free) + 1)]
    across = texts[3][len(texts[1]) - 1 : len(texts[3])]  # from inside one token to inside another
    expected = next(length for length, text in enumerate(texts) if across in text)
    stopped = the_only(run(decoder, request(stop_strings=(across,)))["q"])
    assert stopped.tokens.tolist() == free[:expected]
    assert stopped.stop_reason == "stop"


def test_no_max_tokens_means_up_to_the_end_of_the_context(new_decoder: NewDecoder) -> None:
    sequence = the_only(run(new_decoder(), request(max_tokens=None))["q"])
    assert len(sequence.tokens) == 64 - len(PROMPT)
    assert sequence.stop_reason == "length"


def test_zero_tokens_may_be_requested(new_decoder: NewDecoder) -> None:
    sequence = the_only(run(new_decoder(), request(max_tokens=0, topk_sample_logprobs=2))["q"])
    assert sequence.tokens.shape == (0,)
    assert sequence.stop_reason == "length"
    assert sequence.topk is not None
    assert sequence.topk.token_ids.shape == (0, 2)


def test_requested_prompt_scores_are_returned(new_decoder: NewDecoder, trained: Trained) -> None:
    targets = np.stack([PROMPT[1:], np.full(len(PROMPT) - 1, -1)], 1)
    asked = request(
        weights="run-0",
        num_samples=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_logprobs_last_n=3,
        target_prompt_logprobs=targets,
    )
    output = sampled(run(new_decoder(), asked)["q"])
    theirs = trained.logprobs("run-0", PROMPT.tolist())
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[:-3]).all()
    assert np.abs(output.prompt_logprobs[-3:] - theirs[-3:]).max() < 1e-5
    assert output.topk_prompt is not None
    assert output.topk_prompt.token_ids.shape == (len(PROMPT), 3)
    assert (output.topk_prompt.logprobs[:-3] == np.float32(-99999.0)).all()
    assert (np.diff(output.topk_prompt.logprobs[-3:], axis=1) <= 0).all()
    assert output.target_prompt_logprobs is not None
    assert np.array_equal(output.target_prompt_logprobs[-3:, 0], output.prompt_logprobs[-3:], equal_nan=True)
    assert np.abs(output.target_prompt_logprobs[:, 0] - theirs[-len(targets) :]).max() < 1e-5
    assert np.isnan(output.target_prompt_logprobs[:, 1]).all()
    assert output.cached_prompt_tokens == 3


def test_the_most_probable_tokens_come_first_whatever_was_drawn(new_decoder: NewDecoder) -> None:
    sequence = the_only(run(new_decoder(), request(topk_sample_logprobs=4))["q"])
    assert sequence.topk is not None
    assert sequence.topk.token_ids.shape == (6, 4)
    assert (np.diff(sequence.topk.logprobs, axis=1) <= 0).all()
    assert (sequence.topk.logprobs[:, 0] >= sequence.logprobs).all()
    greedy = the_only(run(new_decoder(), request(temperature=0.0, topk_sample_logprobs=1))["q"])
    assert greedy.topk is not None
    assert greedy.topk.token_ids[:, 0].tolist() == greedy.tokens.tolist()


def test_progress_counts_tokens(new_decoder: NewDecoder) -> None:
    decoder = new_decoder()
    decoder.add(request(num_samples=2))
    done = list(steps(decoder))
    assert sum(step.decoded_tokens for step in done) == 12
    assert sum(step.prompt_tokens for step in done) == len(PROMPT) - 3
    assert not decoder.step().finished


def test_only_a_cancelled_request_is_aborted(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("mine", num_samples=2))
    decoder.add(request("other"))
    vllm.wait_until(generating=3)
    decoder.cancel("mine")
    decoder.cancel("mine")
    decoder.cancel("unknown")
    vllm.wait_until(generating=1, aborted=2)
    vllm.may_generate.set()
    assert finish(decoder).keys() == {"other"}


def test_a_request_may_be_added_again_after_it_was_cancelled(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("mine"))
    vllm.wait_until(generating=1)
    decoder.cancel("mine")
    vllm.wait_until(generating=0, aborted=1)
    vllm.may_generate.set()
    assert len(the_only(run(decoder, request("mine", max_tokens=2))["mine"]).tokens) == 2


def test_a_released_decoder_aborts_everything_and_ends_its_thread(
    vllm: FakeVllm, trained: Trained, tmp_path: Path
) -> None:
    decoder = trained.decoder(vllm.url, shared=tmp_path)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1", num_samples=2))
    vllm.wait_until(generating=2)
    del decoder
    vllm.wait_until(generating=0, aborted=2)
    for thread in [each for each in threading.enumerate() if each.name == "vllm"]:
        thread.join(30)
        assert not thread.is_alive()


def test_releasing_a_decoder_during_a_connect_warns_of_nothing() -> None:
    async def nothing() -> None: ...

    async def ask() -> None:
        async with anyio.create_task_group() as connecting:  # as httpx connects
            connecting.start_soon(asyncio.sleep, 3600)
            await asyncio.sleep(3600)

    async def let_go() -> None:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        server: Any = SimpleNamespace(close=nothing)
        await _abort_all(server)
        assert asking.cancelled()

    asyncio.run(let_go())
    gc.collect()


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
