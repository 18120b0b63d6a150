"""Given experts in place of those that routers choose, in every family with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model import experts
from cotrain_workers.engine.model.base_model import BaseModel, load_base_model
from cotrain_workers.engine.model.expert_choice import ExpertChoices, GivenExperts, expert_choices
from cotrain_workers.engine.ops import Create, Datum, KlDatum, Pass, PassOutput, ReverseKl
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import decoder_of, finish, output, request
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.tiny_models import MIXTURES
from tests.support.training import ModelFolder, NewEngine, Tenant, random_datum, same_bits


def logprobs(engine: Engine, *datums: Datum) -> list[np.ndarray]:
    """Return the log-probs of targets with the adapter of run "r"."""
    op = Pass("r", 1, datums, "cross_entropy", {}, needs_grad=False)
    found = engine.run([op]).outputs["r", 1]
    assert isinstance(found, PassOutput), found
    return list(found.logprobs)


@pytest.mark.parametrize(
    "family",
    [
        *(
            each if each in (*SOME, "mixtral", "glm4_moe", "phimoe") else variant(each)
            for each in (*MIXTURES, "qwen3_next", "lfm2_moe")
        ),
        "granitemoehybrid",
    ],
)
def test_every_family_computes_given_experts(
    new_engine: NewEngine, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(family)
    engine.run([Create("r", 0, AdapterSpec(2, 0))])
    datum = random_datum(np.random.default_rng(3), "cross_entropy", 20)
    asked = request("q", datum.tokens, max_tokens=0, return_routed_experts=True)
    own = output(decoder_of(engine, {}), asked).prompt_routed_experts
    assert own is not None
    choices = engine.facts.expert_choices
    assert choices is not None
    assert own.shape == (20, choices.layers, choices.chosen)
    seen: list[np.ndarray] = []
    dispatch = experts.dispatch

    def recorded(chosen: np.ndarray, *others: Any) -> Any:
        seen.append(chosen)
        return dispatch(chosen, *others)

    monkeypatch.setattr(experts, "dispatch", recorded)
    (plain,) = logprobs(engine, datum)
    np.testing.assert_array_equal(np.stack(seen, axis=1)[:20], own)

    (same,) = logprobs(engine, replace(datum, routed_experts=own))
    np.testing.assert_array_equal(same, plain)

    seen.clear()
    other = (own + 1) % choices.experts
    other[7] = -1  # the router chooses
    two = logprobs(engine, replace(datum, routed_experts=other), datum)
    found = np.stack(seen, axis=1)
    np.testing.assert_array_equal(np.delete(found[:20], 7, 0), np.delete(other, 7, 0))
    np.testing.assert_array_equal(found[20:40], own)
    np.testing.assert_array_equal(two[1], plain)
    assert np.abs(two[0] - plain).max() > 1e-4

    seen.clear()
    kl = KlDatum(datum.tokens, datum.tokens, np.ones(20, np.float32), other)
    engine.run([ReverseKl("r", 2, [kl], None, 1.0)])
    reference, student = np.stack(seen, axis=1)[:20].reshape(20, 2, *own.shape[1:]).swapaxes(0, 1)
    np.testing.assert_array_equal(reference, own)
    np.testing.assert_array_equal(np.delete(student, 7, 0), np.delete(other, 7, 0))

    if family != "phimoe":  # its second expert is chosen among the others
        (swapped,) = logprobs(engine, replace(datum, routed_experts=own[..., ::-1]))
        np.testing.assert_allclose(swapped, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["after softmax", "before softmax", "groups"])
def test_weights_follow_the_rule_of_the_router(kind: str) -> None:
    """The rules of Mixtral, gpt-oss and DeepSeek-V3, with experts of groups that the router would not choose."""
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    given = torch.tensor([[0, 1], [5, 4], [2, 3], [-1, -1], [1, 0]])

    def router() -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "before softmax":
            top, index = torch.topk(logits, 2, dim=-1)
            return top.softmax(-1), index
        scores = logits.softmax(-1) if kind == "after softmax" else logits.sigmoid()
        if kind == "after softmax":
            top, index = torch.topk(scores, 2, dim=-1)
            return top / top.sum(-1, keepdim=True), index
        groups = scores.view(5, 2, 3).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
        mask = torch.zeros(5, 2).scatter_(1, groups, 1)[:, :, None].expand(5, 2, 3).reshape(5, 6)
        top, index = scores.masked_fill(mask == 0, 0.0).topk(2, dim=-1, sorted=False)
        return top / top.sum(-1, keepdim=True), index

    own, _ = router()
    with GivenExperts(given, 6):
        weights, index = router()
    weights.square().sum().backward()

    assert logits.grad is not None
    expected = logits.detach().requires_grad_()
    index = torch.where(given < 0, index, given)
    scores = expected if kind == "before softmax" else expected.softmax(-1)
    scores = expected.sigmoid() if kind == "groups" else scores
    top = scores.gather(1, index)
    if kind == "groups":  # experts of two groups, of which the router takes one
        top = torch.where(torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1]]) > 0, top, 0.0)
    theirs = top.softmax(-1) if kind == "before softmax" else top / top.sum(-1, keepdim=True)
    theirs.square().sum().backward()
    torch.testing.assert_close(weights[3], own[3], rtol=0, atol=0)
    row = slice(None) if kind != "groups" else [0, 1, 4]
    torch.testing.assert_close(weights[row], theirs[row], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.grad[row], expected.grad[row], rtol=1e-12, atol=1e-12)  # type: ignore[index]


@pytest.mark.numerics
@pytest.mark.parametrize("family", [SOME[1], variant(SOME[2])])
def test_samples_return_experts_that_training_replays(
    new_engine: NewEngine, model_folder: ModelFolder, family: str
) -> None:
    """The routers of trainer and sampler differ by less than rounding, so near ties are decided otherwise."""
    folder = str(model_folder(family))
    sampler, trainer = (Engine.load(folder, load_base=tied(each)) for each in (1e-6, -1e-6))
    spec = AdapterSpec(3, 1)
    weights = {"r": random_weights(sampler, "r", spec)}
    random_weights(trainer, "r", spec)
    asked = request("q", np.arange(3, 40), "r", num_samples=2, prompt_logprobs=True, return_routed_experts=True)
    decoder = decoder_of(sampler, weights)

    found = output(decoder, asked)

    assert found.prompt_logprobs is not None
    assert found.prompt_routed_experts is not None
    gaps = []
    for sequence in found.sequences:
        assert sequence.routed_experts is not None
        whole = np.concatenate([asked.prompt, sequence.tokens])
        given = np.concatenate([found.prompt_routed_experts, sequence.routed_experts])
        inputs = {"target_tokens": whole[1:], "weights": np.ones(len(whole) - 1, np.float32)}
        datum = Datum(whole[:-1], inputs, given)
        ours = np.concatenate([found.prompt_logprobs[1:], sequence.logprobs])
        (theirs,) = logprobs(trainer, datum)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        gaps.append(np.abs(ours - logprobs(trainer, replace(datum, routed_experts=None))[0]).max())
    assert max(gaps) > 1e-3

    # The same experts from cached pages, among others, and after preemptions.
    again = replace(asked, id="again", prompt_logprobs=False)
    assert_same_experts(output(decoder, again), found)
    crowd = [request(f"n{at}", np.arange(at, at + 30), max_tokens=20) for at in range(3)]
    small = decoder_of(sampler, weights, kv_tokens=128)
    both = finish(small, [*crowd, again])["again"]
    assert small.preemptions
    assert isinstance(both, SampleOutput)
    assert_same_experts(both, found)


def tied(difference: float) -> Callable[..., BaseModel]:
    """Return a loader of models with two experts in each layer whose scores differ by less than rounding."""

    def load(*args: Any, **settings: Any) -> BaseModel:
        base = load_base_model(*args, **settings)
        values = [*base.backbone.named_parameters(), *base.backbone.named_buffers()]
        for name, each in values:
            if ".mlp.gate." in name or ".mlp.router." in name:
                with torch.no_grad():
                    each[1] = each[0] * (1 + difference)
        return base

    return load


def assert_same_experts(ours: SampleOutput, theirs: SampleOutput) -> None:
    """Check the experts of two results of one request."""
    np.testing.assert_array_equal(ours.prompt_routed_experts, theirs.prompt_routed_experts)
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        np.testing.assert_array_equal(mine.routed_experts, other.routed_experts)


@pytest.mark.numerics
def test_given_experts_of_a_neighbour_change_no_bit(new_engine: NewEngine) -> None:
    """Layers are recomputed, and one datum is longer than a micro-batch."""
    mine = Tenant("mine", AdapterSpec(4, 1), "cross_entropy", (9, 90))
    other = Tenant("other", AdapterSpec(3, 2), "cross_entropy", (11, 70))
    states = []
    for recompute, alone in (("always", False), ("never", True)):
        engine = new_engine("qwen2_moe", micro_batch_tokens=64, recompute=recompute)
        sizes = engine.facts.expert_choices
        for tenant in (mine,) if alone else (other, mine):
            random_weights(engine, tenant.run, tenant.spec)
        mine_ops = [with_experts(op, sizes, 1) for op in mine.ops(1)]
        other_ops = [with_experts(op, sizes, 2) for op in other.ops(1)]
        engine.run(mine_ops if alone else [*other_ops, *mine_ops])
        states.append(engine.adapters.state("mine"))
    assert same_bits(*states)


def with_experts(op: Any, sizes: ExpertChoices | None, seed: int) -> Any:
    """Return an op with random experts for each of its tokens."""
    if not isinstance(op, Pass):
        return op
    assert sizes is not None
    rng = np.random.default_rng(seed)

    def experts_of(datum: Datum) -> np.ndarray:
        shape = (len(datum.tokens), sizes.layers, sizes.experts)
        return rng.random(shape).argsort(axis=-1)[..., : sizes.chosen].astype(np.int16)

    datums = [replace(each, routed_experts=experts_of(each)) for each in op.datums]
    return replace(op, datums=datums)


def test_layers_of_other_sizes_have_no_common_choice() -> None:
    class Config:
        num_experts_per_tok: Any = 2

    assert expert_choices(Config(), [6, 6]) == ExpertChoices(2, 2, 6)
    assert expert_choices(Config(), []) is None
    assert expert_choices(Config(), [6, 8]) is None
    Config.num_experts_per_tok = [2, 3]
    assert expert_choices(Config(), [6, 6]) is None
