"""Images in training and sampling: against transformers and PEFT, and among neighbours with text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.vision import FeatureCache, ImageFacts, rotary_positions
from cotrain_workers.engine.ops import Create, Datum, Failure, HostWeights, Image, Op, OptimStep, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import assert_same, decoder_of, finish, output, request
from tests.support.draws import variant
from tests.support.images import PLACEHOLDER, SIDE, ImageOracle, image, pictured_datum, with_images
from tests.support.shared_base import shared_base
from tests.support.training import Tenant, random_datum, same_bits

TOLERANCE = 1e-5
SPEC = AdapterSpec(5, 1)
TEXT = Tenant("text", AdapterSpec(2, 2), "cispo", (18, 3))
#: Two images in one sequence, one of them at its start and across pages of 16 tokens; one image twice.
DATUMS = [
    pictured_datum(np.random.default_rng(0), 40, image(0, 4, 5, 1), image(25, 2, 3, 2)),
    random_datum(np.random.default_rng(1), "cross_entropy", 7),
    pictured_datum(np.random.default_rng(2), 12, image(3, 2, 3, 2)),
]


def mine(cycle: int, tenant: str = "mine") -> list[Op]:
    first = 5 * cycle
    half = Pass("mine", first + 1, DATUMS[:1], "cross_entropy", {}, True, tenant=tenant)
    step = OptimStep("mine", first + 3, 1e-2, 0.9, 0.95, 1e-3, 0.01, 1.0)
    return [half, replace(half, seq=first + 2, datums=DATUMS[1:]), step]


def logprobs(engine: Engine, datums: list[Datum]) -> list[np.ndarray]:
    op = Pass("mine", 90, datums, "cross_entropy", {}, needs_grad=False)
    output = engine.run([op]).outputs["mine", 90]
    assert isinstance(output, PassOutput), output
    return list(output.logprobs)


def apart(one: np.ndarray | torch.Tensor, other: np.ndarray | torch.Tensor) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl", variant("qwen3-vl-moe")])
def test_images_compute_as_in_transformers_and_peft(model_folder: Callable[..., Path], family: str) -> None:
    folder = model_folder(family)
    # The adapter of experts has a test of its own (`test_families.py`).
    spec = AdapterSpec(5, 1, train_mlp=family != "qwen3-vl-moe")
    # The first datum is longer than a micro-batch, and runs layer by layer.
    new_engine = partial(Engine.load, str(folder), load_base=shared_base, micro_batch_tokens=32)
    together, texts = new_engine(recompute="never"), new_engine(recompute="never")
    alone = new_engine(recompute="always")
    oracle = ImageOracle(folder, spec)
    optimizer = torch.optim.AdamW(oracle.parameters())
    creates, of_text = Create("mine", 0, spec), TEXT.ops(0)[:1]
    together.run([*of_text, creates])
    alone.run([creates])
    texts.run(of_text)
    layout = together.adapters["mine"].layout
    oracle.load(layout, together.adapters.state("mine").weights)
    for cycle in range(3):
        text, ops = TEXT.ops(cycle)[not cycle :], mine(cycle)
        together.run([text[0], *ops, *text[1:]])
        alone.run(ops)
        texts.run(text)
        for op in ops:
            if isinstance(op, Pass):
                oracle.backward(op)
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        optimizer.param_groups[0].update(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)
        optimizer.step()
        optimizer.zero_grad()

    state = together.adapters.state("mine")
    assert same_bits(state, alone.adapters.state("mine"))
    assert same_bits(*(engine.adapters.state("text") for engine in (together, texts)))
    assert apart(state.weights, oracle.arena(layout, grads=False)) < TOLERANCE
    with torch.no_grad():
        for ours, datum in zip(logprobs(together, DATUMS), DATUMS, strict=True):
            assert apart(ours, oracle.logprobs(datum)) < TOLERANCE
    assert together.facts.images == ImageFacts(SIDE, 256, 4096, PLACEHOLDER)

    weights = {"mine": HostWeights(spec, state.weights)}
    prompt, images = DATUMS[0].tokens, DATUMS[0].images
    asked = [
        request(
            name, prompt, "mine",
            images=images, max_tokens=6, temperature=temperature, prompt_logprobs=True, tenant="me",
        )
        for name, temperature in (("greedy", 0.0), ("warm", 1.0))
    ]  # fmt: skip
    plain = request("plain", DATUMS[1].tokens, "mine", max_tokens=6, prompt_logprobs=True)
    decoder = decoder_of(together, weights)
    among = finish(decoder, [*asked, plain])
    for each in asked:
        result = among[each.id]
        assert isinstance(result, SampleOutput), result
        tokens = np.concatenate([prompt, result.sequences[0].tokens])
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
        (theirs,) = logprobs(together, [Datum(tokens[:-1], inputs, images=images)])
        assert result.prompt_logprobs is not None
        ours = np.concatenate([result.prompt_logprobs[1:], result.sequences[0].logprobs])
        assert apart(ours, theirs) < TOLERANCE
        # A cached prefix with images gives the same bits; another image in its place is not found.
        cached = output(decoder, replace(each, id="cached", prompt_logprobs=False))
        assert cached.cached_prompt_tokens > 0
        np.testing.assert_array_equal(cached.sequences[0].logprobs, result.sequences[0].logprobs)
    other = replace(asked[0], images=[image(0, 4, 5, 9), images[1]], prompt_logprobs=False)
    assert output(decoder, other).cached_prompt_tokens == 0
    alike, alone_plain = among["plain"], output(decoder_of(texts, weights), plain)
    assert isinstance(alike, SampleOutput)
    assert_same(alike, alone_plain)
    greedy = among["greedy"]
    assert isinstance(greedy, SampleOutput)
    assert greedy.sequences[0].tokens.tolist() == oracle.generated(prompt, images, 6)


def test_the_tower_runs_once_per_image_and_tenant(model_folder: Callable[..., Path]) -> None:
    engine = Engine.load(str(model_folder("qwen3-vl")), load_base=shared_base)
    vision = engine._base.vision
    assert vision is not None
    engine.run([Create("mine", 0, SPEC), *mine(0)])
    assert vision.runs == 2
    ours = request("ours", DATUMS[2].tokens, images=DATUMS[2].images, max_tokens=1, tenant="mine")
    output(decoder_of(engine, {}), ours)
    assert vision.runs == 2
    output(decoder_of(engine, {}), replace(ours, tenant="other"))
    assert vision.runs == 3


def test_equal_tokens_with_different_images_share_no_rows(model_folder: Callable[..., Path]) -> None:
    engine = Engine.load(str(model_folder("qwen3-vl")), load_base=shared_base)
    engine.run([Create("mine", 0, SPEC)])
    plain = random_datum(np.random.default_rng(0), "cross_entropy", 80)  # a shared prompt has 64
    one, other = (with_images(plain, image(5, 2, 3, seed)) for seed in (1, 2))

    both = logprobs(engine, [one, other])
    single = [logprobs(engine, [each])[0] for each in (one, other)]
    assert all(map(np.array_equal, both, single))
    assert not np.array_equal(both[0], both[1])


def test_an_image_after_texts_that_share_a_prompt_keeps_its_rows(model_folder: Callable[..., Path]) -> None:
    engine = Engine.load(str(model_folder("qwen3-vl")), load_base=shared_base)
    engine.run([Create("mine", 0, SPEC)])
    text = random_datum(np.random.default_rng(0), "cross_entropy", 80)
    pictured = with_images(random_datum(np.random.default_rng(1), "cross_entropy", 20), image(5, 2, 3, 1))

    found = logprobs(engine, [text, text, pictured])
    alone = [logprobs(engine, [each])[0] for each in (text, text, pictured)]
    assert max(map(apart, found, alone)) < TOLERANCE


def test_a_broken_image_fails_alone(model_folder: Callable[..., Path]) -> None:
    folder = str(model_folder("qwen3-vl"))
    engine, alone = (Engine.load(folder, load_base=shared_base) for _ in range(2))
    for each in (engine, alone):
        each.run([Create("broken", 0, SPEC), *TEXT.ops(0)])
    cut = replace(image(3, 2, 3), data=image(3, 2, 3).data[:-30])
    broken = Pass("broken", 1, [with_images(DATUMS[1], cut)], "cross_entropy", {}, True)
    larger = replace(broken, seq=2, datums=[with_images(DATUMS[2], replace(cut, data=image(0, 3, 3).data))])
    outputs = engine.run([broken, larger, *TEXT.ops(1)]).outputs
    alone.run(TEXT.ops(1))

    messages = [each.message for each in outputs.values() if isinstance(each, Failure)]
    assert messages == [
        "An image cannot be decoded: image file is truncated.",
        "An image has 9 tokens here and 6 in the request.",
    ]
    assert same_bits(*(each.adapters.state("text") for each in (engine, alone)))
    assert not engine.adapters["broken"].grads_pending
    asked = request("broken", DATUMS[2].tokens, images=[cut], max_tokens=2)
    beside = request("beside", DATUMS[1].tokens, max_tokens=2)
    found = finish(decoder_of(engine, {}), [asked, beside])
    assert found["broken"] == Failure(messages[0], "user")
    assert isinstance(found["beside"], SampleOutput)


def test_a_text_model_refuses_images(model_folder: Callable[..., Path]) -> None:
    engine = Engine.load(str(model_folder("qwen3")), load_base=shared_base)
    found = engine.run([Create("mine", 0, SPEC), *mine(0)]).outputs["mine", 1]
    assert isinstance(found, Failure)
    assert found.message == "This base model reads no images here."
    asked = request("asked", DATUMS[2].tokens, images=DATUMS[2].images)
    assert decoder_of(engine, {}).refuse(asked) == "This sampler reads no images."


def test_positions_count_rows_and_columns_of_images() -> None:
    positions, after = rotary_positions(10, [Image(1, 2, 3, b""), Image(8, 1, 1, b"")])

    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]
    assert after == 7


def test_the_cache_drops_results_of_the_tenant_that_holds_most() -> None:
    cache, row = FeatureCache(5 * 4), torch.zeros(1)
    cache.put("few", b"a", row)
    for digest in (b"1", b"2", b"3", b"4"):
        cache.put("many", digest, row)
    assert cache.get("many", b"1") is not None  # now the newest
    cache.put("many", b"5", row)
    cache.put("many", b"large", torch.zeros(9))

    assert cache.get("few", b"a") is row
    assert cache.get("other", b"a") is None
    held = [each for each in (b"1", b"2", b"3", b"4", b"5", b"large") if cache.get("many", each) is not None]
    assert held == [b"1", b"3", b"4", b"5"]
