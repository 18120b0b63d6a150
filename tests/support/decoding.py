"""Sample requests and runs of a decoder, for tests of the engine's decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import NO_TOP_K, SampleOutput, SampleRequest, TopK
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.facts import Numerics
from cotrain_workers.engine.ops import Datum, Failure, HostWeights, Pass, PassOutput, Save, SaveOutput
from tests.support.training import MIX

VOCAB = 128
RUNS = [tenant.run for tenant in MIX]
Result = SampleOutput | Failure


def request(name: str, prompt: Sequence[int] | np.ndarray, weights: str | None = None, **changes: Any) -> SampleRequest:
    """Return a request for one sample of 12 tokens at temperature 1. `changes` override its fields."""
    settings: dict[str, Any] = {
        "num_samples": 1,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_k": NO_TOP_K,
        "top_p": 1.0,
        "seed": 7,
        "stop_tokens": frozenset(),
        "stop_strings": (),
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_logprobs_last_n": None,
        "target_prompt_logprobs": None,
    }
    return SampleRequest(name, weights, np.asarray(prompt, dtype=np.int64), **{**settings, **changes})


def trained_weights(engine: Engine) -> dict[str, HostWeights]:
    """Train every tenant of `MIX` for one step and save it: no B is zero, ranks 1 to 16.

    On a CPU, a fresh engine gets the bits that an equal engine computed before.
    """
    if engine.facts.numerics.device != "cpu":
        return _train(engine)
    kind = (engine.facts.model, engine.facts.numerics)
    if kind not in _TRAINED:
        weights = _train(engine)
        _TRAINED[kind] = {run: engine.adapters.state(run) for run in weights}, weights
    states, weights = _TRAINED[kind]
    for run, state in states.items():
        engine.adapters.restore(run, state)
    return dict(weights)


def _train(engine: Engine) -> dict[str, HostWeights]:
    engine.run([op for tenant in MIX for op in tenant.ops(0)])
    outputs = engine.run([Save(tenant.run, 5) for tenant in MIX]).outputs
    weights = {}
    for tenant in MIX:
        output = outputs[tenant.run, 5]
        assert isinstance(output, SaveOutput)
        weights[tenant.run] = output.weights
    return weights


_TRAINED: dict[tuple[str, Numerics], tuple[dict[str, AdapterState], dict[str, HostWeights]]] = {}
"""States of the tenants after that step and their saved weights, by model and numerics."""


def text(tokens: Sequence[int]) -> str:
    """Decode like a byte-level tokenizer: token t is byte t + 97, so 0 is "a"."""
    return bytes((token + 97) % 256 for token in tokens).decode(errors="replace")


def decoder_of(engine: Engine, weights: Mapping[str, HostWeights], kv_tokens: int = 4096) -> EngineDecoder:
    """Return a decoder with pages of 16 tokens, so that short prompts have several."""
    return engine.decoder(weights.__getitem__, kv_tokens=kv_tokens, text=text, page_tokens=16, step_tokens=64)


def neighbours(seed: int, count: int = 24) -> list[SampleRequest]:
    """Return requests with different adapters, lengths and parameters."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"neighbour-{at}",
            rng.integers(0, VOCAB, rng.integers(1, 80)),
            [None, *RUNS][at % (len(RUNS) + 1)],
            num_samples=int(rng.integers(1, 4)),
            max_tokens=int(rng.integers(1, 20)),
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(rng.choice([-1, 3, 40])),
            top_p=float(rng.choice([1.0, 0.4, 0.9])),
            seed=at,
            stop_tokens=frozenset({int(rng.integers(0, VOCAB))}),
            topk_sample_logprobs=int(rng.integers(0, 4)),
            topk_prompt_logprobs=int(rng.choice([0, 2])),
        )
        for at in range(count)
    ]


def whole(name: str, weights: str | None, length: int = 37) -> SampleRequest:
    """Return a request with every optional output."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length)
    targets = np.random.default_rng(1).integers(-1, VOCAB, (length - 1, 3))
    return request(
        name,
        prompt,
        weights,
        num_samples=3,
        max_tokens=16,
        top_p=0.9,
        top_k=50,
        topk_sample_logprobs=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
    )


def finish(
    decoder: EngineDecoder, requests: Iterable[SampleRequest], each_step: Callable[[], None] = lambda: None
) -> dict[str, Result]:
    """Add all requests, step until all are done, and check that no page leaked."""
    for each in requests:
        reason = decoder.refuse(each)
        assert reason is None, reason
        decoder.add(each)
    found: dict[str, Result] = {}
    while decoder.busy:
        found.update(decoder.step().finished)
        each_step()
    assert_nothing_is_held(decoder)
    return found


def output(decoder: EngineDecoder, each: SampleRequest, among: Iterable[SampleRequest] = ()) -> SampleOutput:
    """Return the output of one request that runs among others."""
    found = finish(decoder, [*among, each])[each.id]
    assert isinstance(found, SampleOutput), found
    return found


def assert_nothing_is_held(decoder: EngineDecoder) -> None:
    """Check that every page is free or cached and evictable, and that no weights are in use."""
    assert decoder.pages.free + decoder.pages.idle == decoder.pages.count
    assert not any(slot.users for slot in decoder.slots.filled())


def trainer_logprobs(engine: Engine, run: str, *sequences: np.ndarray) -> list[np.ndarray]:
    """Return the trainer's log-probs of tokens 1.. of each sequence, float32 `[n - 1]`."""
    return target_logprobs(engine, run, [(each[:-1], each[1:]) for each in sequences])


def target_logprobs(engine: Engine, run: str, asked: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return the trainer's log-probs of targets after tokens `[n]`; targets and result are `[n]` or `[n, K]`, float32."""
    datums = [
        Datum(
            tokens.astype(np.int64),
            {"target_tokens": targets.astype(np.int64), "weights": np.ones(targets.shape, np.float32)},
        )
        for tokens, targets in asked
    ]
    op = Pass(run, 9, datums, "cross_entropy", {}, needs_grad=False)
    found = engine.run([op]).outputs[run, 9]
    assert isinstance(found, PassOutput)
    return list(found.logprobs)


def assert_all_same(ours: Mapping[str, Result], theirs: Mapping[str, Result]) -> None:
    """Check that `ours` has every request of `theirs`, with equal bits."""
    for name, expected in theirs.items():
        assert_same(ours[name], expected)


def assert_same(ours: Result, theirs: Result) -> None:
    """Check that two requests succeeded with equal bits, apart from the number of cached tokens."""
    assert isinstance(ours, SampleOutput), ours
    assert isinstance(theirs, SampleOutput), theirs
    assert len(ours.sequences) == len(theirs.sequences)
    for one, other in zip(ours.sequences, theirs.sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens, strict=True)
        np.testing.assert_array_equal(one.logprobs, other.logprobs, strict=True)
        assert one.stop_reason == other.stop_reason
        assert_same_arrays(arrays(one.topk), arrays(other.topk))
    assert_same_arrays(arrays(ours.topk_prompt), arrays(theirs.topk_prompt))
    assert_same_arrays(arrays(ours.prompt_logprobs), arrays(theirs.prompt_logprobs))
    assert_same_arrays(arrays(ours.target_prompt_logprobs), arrays(theirs.target_prompt_logprobs))


def arrays(value: TopK | np.ndarray | None) -> list[np.ndarray]:
    """Return the arrays of an optional part of an output."""
    if value is None:
        return []
    return [value] if isinstance(value, np.ndarray) else [value.token_ids, value.logprobs]


def assert_same_arrays(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Check that arrays have equal bits, including NaN, or that both are absent."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@dataclass(frozen=True)
class Gap:
    """Differences of the decoder's log-probabilities from the trainer's, over all tokens."""

    mean: float
    largest: float


def gap_to_trainer(engine: Engine) -> Gap:
    """Sample from every tenant of `MIX` in one batch. Return the gap to the log-probs of `forward` for the same tokens."""
    weights = trained_weights(engine)
    vocab = engine.facts.vocab_size
    requests = [
        request(
            f"{run}-{size}",
            np.random.default_rng(size).integers(0, vocab, size),
            run,
            max_tokens=40,
            num_samples=2,
            prompt_logprobs=True,
        )
        for run in weights
        for size in (2, 16, 45)
    ]
    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)
    found, gaps = finish(decoder, requests), []
    for each in requests:
        result = found[each.id]
        assert isinstance(result, SampleOutput), result
        assert result.prompt_logprobs is not None
        assert each.weights is not None
        for sequence in result.sequences:
            ours = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            tokens = np.concatenate([each.prompt, sequence.tokens])
            (theirs,) = trainer_logprobs(engine, each.weights, tokens)
            gaps.append(np.abs(ours - theirs))
    every = np.concatenate(gaps)
    return Gap(float(every.mean()), float(every.max()))


def is_same_alone(engine: Engine) -> bool:
    """Return True if seeded requests give the same tokens alone and together."""
    weights = trained_weights(engine)
    requests = [
        request(run, np.random.default_rng(at).integers(0, engine.facts.vocab_size, 9 * at + 1), run)
        for at, run in enumerate(weights)
    ]

    def fresh() -> EngineDecoder:
        return engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)

    together = finish(fresh(), requests)
    for each in requests:
        alone, beside = output(fresh(), each), together[each.id]
        assert isinstance(beside, SampleOutput), beside
        if not np.array_equal(alone.sequences[0].tokens, beside.sequences[0].tokens):
            return False
    return True


def graph_report(decoder: EngineDecoder) -> str:
    """Return the number of CUDA graphs in use, and the reasons against the others."""
    graphs = decoder.runner.graphs
    if graphs is None:
        return "none: the plain steps run"
    return "; ".join([f"{graphs.used} in use", *graphs.refused])
