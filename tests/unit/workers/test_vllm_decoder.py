"""The vLLM decoder over real HTTP, against a small server that computes with a tiny real model."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cotrain_workers import vllm_sampler
from cotrain_workers.engine import Engine
from cotrain_workers.ops import Create, Datum, Failure, OptimStep, Pass, PassOutput
from cotrain_workers.peft_folder import write_folder
from cotrain_workers.sample_ops import (
    NO_TOP_K,
    HostWeights,
    Progress,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    WeightsGone,
)
from cotrain_workers.spec import AdapterSpec
from cotrain_workers.vllm_decoder import VllmDecoder
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_models import build_tiny_qwen3
from tests.support.training import random_datum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    NewDecoder = Callable[..., VllmDecoder]

BASE = "tiny/qwen3"
VOCAB = 512
PROMPT = np.arange(40, 48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


class Trained:
    """An engine with a few runs that were trained one step, and the folders of their weights."""

    SPECS = (
        AdapterSpec(4, seed=0),
        AdapterSpec(1, seed=1, train_unembed=False),
        AdapterSpec(8, seed=2, train_attn=False, train_unembed=False),
        AdapterSpec(2, seed=3, train_mlp=False, train_unembed=False),
        AdapterSpec(3, seed=4, train_unembed=False, alpha=7.0),
    )

    def __init__(self, model: Path, root: Path) -> None:
        self.engine = Engine.load(str(model))
        self.folders: dict[str, Path] = {}
        rng = np.random.default_rng(0)
        for number, spec in enumerate(self.SPECS):
            run = f"run-{number}"
            data = [random_datum(rng, "cross_entropy", 12, vocab=VOCAB)]
            step = OptimStep(run, 2, 3e-2, 0.9, 0.95, 1e-8, 0.0, grad_clip_norm=0.0)
            forward_backward = Pass(run, 1, data, "cross_entropy", {}, needs_grad=True)
            self.engine.run([Create(run, 0, spec), forward_backward, step])
            weights = HostWeights(spec, self.engine.state(run).weights)
            layout = self.engine.layout(run)
            self.folders[run] = write_folder(root, weights, layout, BASE).path

    def decoder(self, url: str, shared: Path, **settings: object) -> VllmDecoder:
        """Return a decoder that asks the server at `url` for these runs."""
        defaults = {"folder": self.folders.__getitem__, "targets": self.engine.targets}
        return VllmDecoder(
            url,
            api_key="",
            base_model=BASE,
            vocab_size=VOCAB,
            shared=shared,
            **{**defaults, **settings},  # type: ignore[arg-type]
        )

    def logprobs(self, run: str, tokens: Sequence[int]) -> np.ndarray:
        """Return the trainer's log-probs of `tokens[1:]`."""
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1)}
        datum = Datum(np.array(tokens[:-1]), inputs)
        forward = Pass(run, 9, [datum], "cross_entropy", {}, needs_grad=False)
        output = self.engine.run([forward]).outputs[run, 9]
        assert isinstance(output, PassOutput)
        return output.logprobs[0]


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(model, tmp_path_factory.mktemp("weights"))


@pytest.fixture
def vllm(model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(model, BASE) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_sampler, "PAUSE_S", (0.002, 0.02))


@pytest.fixture
def new_decoder(vllm: FakeVllm, trained: Trained, tmp_path: Path) -> Iterator[NewDecoder]:
    opened: list[VllmDecoder] = []

    def new(**settings: object) -> VllmDecoder:
        opened.append(trained.decoder(vllm.url, tmp_path, **settings))
        return opened[-1]

    yield new
    for decoder in opened:
        decoder.close()


def request(name: str = "q", weights: str | None = None, **changes: object) -> SampleRequest:
    plain = SampleRequest(
        id=name,
        weights=weights,
        prompt=PROMPT,
        num_samples=1,
        max_tokens=6,
        temperature=1.0,
        top_k=NO_TOP_K,
        top_p=1.0,
        seed=7,
        stop_tokens=frozenset(),
        stop_strings=(),
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_sample_logprobs=0,
        prompt_logprobs_last_n=None,
        target_prompt_logprobs=None,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def run(decoder: VllmDecoder, *requests: SampleRequest) -> dict[str, SampleOutput | Failure]:
    for each in requests:
        assert decoder.refuse(each) is None
        decoder.add(each)
    return finish(decoder)


def finish(decoder: VllmDecoder) -> dict[str, SampleOutput | Failure]:
    return {name: output for each in steps(decoder) for name, output in each.finished}


def steps(decoder: VllmDecoder) -> Iterator[Progress]:
    """Yield every step until nothing is left to do."""
    while decoder.busy:
        yield decoder.step()
        time.sleep(0.001)  # a step never waits, and the server computes on the same cores


def sampled(output: SampleOutput | Failure) -> SampleOutput:
    assert isinstance(output, SampleOutput), output
    return output


def tokens(output: SampleOutput | Failure) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in sampled(output).sequences]


def the_only(output: SampleOutput | Failure) -> SampledSequence:
    (sequence,) = sampled(output).sequences
    return sequence


@pytest.mark.parametrize("name", ["run-0", "run-1", "run-2", "run-3", "run-4"])
def test_logprobs_of_a_trained_adapter_are_the_trainers(
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
    outputs = run(
        new_decoder(), *(request(str(name), name, prompt_logprobs=True) for name in names)
    )
    scores = {tuple(sampled(outputs[str(name)]).prompt_logprobs[1:]) for name in names}  # type: ignore[index]
    assert len(scores) == len(names)


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_others(
    new_decoder: NewDecoder,
) -> None:
    mine = request("mine", "run-1", num_samples=3, seed=5)
    others = [request(f"o{n}", f"run-{n % 5}", seed=n) for n in range(20)]
    alone = run(new_decoder(), mine)["mine"]
    among = run(new_decoder(max_adapters=2), *others[:10], mine, *others[10:])["mine"]
    assert tokens(alone) == tokens(among)
    assert len({tuple(each) for each in tokens(alone)}) == 3


def test_sequences_of_neighbouring_seeds_share_nothing(new_decoder: NewDecoder) -> None:
    one, two = (request(f"s{seed}", num_samples=4, seed=seed) for seed in (1, 2))
    outputs = run(new_decoder(), one, two)
    drawn = [tuple(each) for name in ("s1", "s2") for each in tokens(outputs[name])]
    assert len(set(drawn)) == 8


def test_many_requests_over_many_adapters_all_finish_with_room_for_two(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    requests = [
        request(f"r{n}", [*trained.folders, None][n % 6], num_samples=1 + n % 3) for n in range(48)
    ]
    decoder = new_decoder(max_adapters=2, max_sequences=8)
    outputs = run(decoder, *requests)
    assert {name: len(tokens(output)) for name, output in outputs.items()} == {
        each.id: each.num_samples for each in requests
    }
    assert vllm.most_loaded == 2
    assert vllm.pulled_away == []
    assert vllm.most_generating <= 8
    names = {body["lora_name"] for body in vllm.bodies("/v1/load_lora_adapter")}
    assert {path.name for path in trained.folders.values()} < names  # and those of the check


def test_an_adapter_in_use_stays_until_its_last_sequence_ends(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    decoder = new_decoder(max_adapters=1)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1"))
    vllm.wait_until(generating=1)
    decoder.add(request("two", "run-2"))
    decoder.add(request("three", "run-1"))  # not before its turn: else "two" might wait for ever
    for _, step in zip(range(100), steps(decoder), strict=False):
        assert not step.finished
    assert vllm.generating == 1
    vllm.may_generate.set()
    assert finish(decoder).keys() == {"one", "two", "three"}
    assert vllm.pulled_away == []
    assert vllm.most_loaded == 1


def test_the_stop_token_stays_and_ends_the_sequence(new_decoder: NewDecoder) -> None:
    free = the_only(run(new_decoder(), request())["q"])
    assert free.stop_reason == "length"
    stop = int(free.tokens[2])
    first = free.tokens.tolist().index(stop)
    stopped = the_only(run(new_decoder(), request(stop_tokens=frozenset({stop})))["q"])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.stop_reason == "stop"


def test_the_tokens_that_complete_a_stop_string_stay(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
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


def test_a_wish_for_no_tokens_is_granted(new_decoder: NewDecoder) -> None:
    sequence = the_only(run(new_decoder(), request(max_tokens=0, topk_sample_logprobs=2))["q"])
    assert sequence.tokens.shape == (0,)
    assert sequence.stop_reason == "length"
    assert sequence.topk is not None
    assert sequence.topk.token_ids.shape == (0, 2)


def test_what_is_asked_about_the_prompt_is_answered(
    new_decoder: NewDecoder, trained: Trained
) -> None:
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
    assert np.array_equal(
        output.target_prompt_logprobs[-3:, 0], output.prompt_logprobs[-3:], equal_nan=True
    )
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


def test_a_server_that_restarts_in_the_middle_loses_nothing(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
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


def test_requests_wait_for_a_server_that_is_not_up_yet(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    vllm.stop()
    decoder = new_decoder()
    decoder.add(request())
    assert not decoder.step().finished
    assert decoder.waiting == 1
    vllm.start()
    assert len(the_only(finish(decoder)["q"]).tokens) == 6
    assert decoder.waiting == 0


def test_an_adapter_that_the_server_lost_is_loaded_again(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    decoder = new_decoder()
    before = run(decoder, request(weights="run-1"))["q"]
    vllm.unload(trained.folders["run-1"].name)
    assert tokens(run(decoder, request(weights="run-1"))["q"]) == tokens(before)


def test_an_adapter_that_somebody_else_loaded_is_used(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    first = run(new_decoder(), request(weights="run-1"))["q"]
    assert tokens(run(new_decoder(), request(weights="run-1"))["q"]) == tokens(first)


def test_a_cancelled_request_is_aborted_and_nobody_else(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
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


def test_a_request_may_be_added_again_after_it_was_cancelled(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("mine"))
    vllm.wait_until(generating=1)
    decoder.cancel("mine")
    vllm.wait_until(generating=0, aborted=1)
    vllm.may_generate.set()
    assert len(the_only(run(decoder, request("mine", max_tokens=2))["mine"]).tokens) == 2


def test_a_request_that_the_server_refuses_fails_alone_with_its_words(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    vllm.max_logprobs = 5
    outputs = run(new_decoder(), request("many", topk_sample_logprobs=6), request("few"))
    assert outputs["many"] == Failure(
        "The sampler refused this: Requested more logprobs than the allowed 5.", "user"
    )
    assert tokens(outputs["few"])


def test_one_sequence_that_fails_ends_its_request_and_its_other_sequences(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
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


def test_a_server_that_says_it_is_busy_is_asked_until_it_is_not(
    new_decoder: NewDecoder, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_sampler, "TRIES", 2)
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.fails[99] = [(503, "starting")] * 4
    assert tokens(run(decoder, request(prompt=np.array([5, 99, 5])))["q"])
    assert vllm.fails[99] == []


def test_an_error_that_passes_is_tried_again(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    undisturbed = run(decoder, request())["q"]
    vllm.answers["/v1/completions"] = [(500, "oops"), (503, "busy"), (429, "busy")]
    assert tokens(run(decoder, request())["q"]) == tokens(undisturbed)


def test_a_request_that_the_server_always_fails_on_fails_alone(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    vllm.fails[99] = [(500, {"error": {"message": "Internal server error"}})] * 8
    poisoned = request("poisoned", prompt=np.array([5, 99, 5]))
    outputs = run(new_decoder(), poisoned, request("sound"))
    assert outputs["poisoned"] == vllm_sampler.BROKEN
    assert tokens(outputs["sound"])


def test_an_answer_that_cannot_be_read_fails_its_request_alone(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.answers["/v1/completions"] = [(200, {"choices": []})]
    assert run(decoder, request("bad"))["bad"] == vllm_sampler.BROKEN
    assert tokens(run(decoder, request("good"))["good"])


def test_a_key_that_is_refused_later_is_no_fault_of_the_requests(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    vllm.api_key = "changed"
    accepted = len(vllm.calls)
    decoder.add(request())
    vllm.wait_until(calls=accepted + 3)
    assert not decoder.step().finished
    vllm.api_key = ""
    assert tokens(finish(decoder)["q"])


def test_weights_that_the_server_cannot_load_fail_without_naming_a_path(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    path = "/v1/load_lora_adapter"
    vllm.answers[path] = [(500, {"error": {"message": "While loading /data/secret: rank 64"}})]
    outputs = run(decoder, request("big", "run-1"))
    assert outputs == {"big": vllm_sampler.NOT_LOADED}
    assert tokens(run(decoder, request("again", "run-1"))["again"])


@pytest.mark.parametrize("unembedding", ["refused", "ignored"])
def test_an_unembedding_that_the_server_leaves_out_is_refused_in_words(
    new_decoder: NewDecoder, vllm: FakeVllm, unembedding: str
) -> None:
    vllm.unembedding = unembedding
    outputs = run(new_decoder(), request("head", "run-0"), request("body", "run-1"))
    assert outputs["head"] == vllm_sampler.UNEMBEDDING
    assert tokens(outputs["body"])


def test_a_request_waits_until_the_folder_of_its_weights_is_written(
    new_decoder: NewDecoder, trained: Trained
) -> None:
    written: dict[str, Path] = {}
    decoder = new_decoder(folder=written.get)
    decoder.add(request("waits", "run-1"))
    decoder.add(request("base"))
    base = next(step for step in steps(decoder) if step.finished)
    assert [name for name, _ in base.finished] == ["base"]
    assert decoder.waiting == 1
    written.update(trained.folders)
    assert tokens(finish(decoder)["waits"])


def test_weights_that_are_gone_fail_their_request_alone(new_decoder: NewDecoder) -> None:
    def folder(key: str) -> Path:
        raise WeightsGone(key)

    decoder = new_decoder(folder=folder)
    outputs = run(decoder, request("gone", "run-1"), request("base"))
    assert outputs["gone"] == vllm_sampler.GONE
    assert tokens(outputs["base"])


def test_dropped_weights_are_unloaded_once_nobody_uses_them(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    name = trained.folders["run-1"].name
    same = {**trained.folders, "same": trained.folders["run-1"]}
    decoder = new_decoder(folder=same.__getitem__)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1"))
    decoder.add(request("two", "same"))
    vllm.wait_until(generating=2)
    decoder.drop_weights("run-1")  # "same" still has them
    decoder.drop_weights("same")
    decoder.drop_weights("unknown")
    assert name in vllm.loaded
    vllm.may_generate.set()
    assert finish(decoder).keys() == {"one", "two"}
    vllm.wait_until(unloaded=name)
    assert vllm.pulled_away == []


def test_what_can_never_run_is_refused_in_words(new_decoder: NewDecoder) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))  # from here on the server's context is known
    long = decoder.refuse(request(prompt=np.ones(64, np.int64)))
    assert long == "The prompt has 64 tokens; the context holds 64, one of them generated."
    many = decoder.refuse(request(topk_prompt_logprobs=VOCAB + 1))
    assert many == "topk_prompt_logprobs is 513; the vocabulary has 512 tokens."
    foreign = decoder.refuse(request(target_prompt_logprobs=PROMPT[1:, None] + 1))
    assert foreign is not None
    assert foreign.startswith("target_prompt_logprobs: ")


def test_a_prompt_that_is_too_long_is_refused_also_before_the_server_was_seen(
    new_decoder: NewDecoder, vllm: FakeVllm
) -> None:
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


def test_a_decoder_that_is_let_go_aborts_everything_and_ends_its_thread(
    vllm: FakeVllm, trained: Trained, tmp_path: Path
) -> None:
    decoder = trained.decoder(vllm.url, tmp_path)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1", num_samples=2))
    vllm.wait_until(generating=2)
    del decoder
    vllm.wait_until(generating=0, aborted=2)
    assert not any(thread.name == "vllm" for thread in threading.enumerate())
