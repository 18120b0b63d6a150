"""vLLM decoder over real HTTP, with a small server that computes with a tiny real model."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from cotrain_workers.sampling.vllm.decoder import VllmDecoder, _abort_all
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
    assert not any(thread.name == "vllm" for thread in threading.enumerate())


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
