"""Validation of passes: the wording of each refusal, and that no invalid pass is accepted.

The loss inputs that the API requires are compared with those that the engine reads.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.types import AdamParams
from cotrain.wire.custom_loss import CustomLoss, encode_loss
from cotrain_server.errors import Invalid
from cotrain_server.requests.pass_validation import NEEDS_BY_LOSS, check_adam, check_pass, check_rank
from cotrain_store.bodies.pass_body import DatumArrays, PassBody
from cotrain_workers.engine.training.losses import LOSSES
from tests.support.http_api import POOL


def datum(length: int = 3, loss_fn: str = "cross_entropy", **changes: Any) -> DatumArrays:
    inputs: dict[str, np.ndarray] = {"target_tokens": np.arange(length)}
    for name in NEEDS_BY_LOSS[loss_fn].inputs:
        inputs[name] = np.ones(length, np.float32)
    return DatumArrays(np.arange(length), inputs | changes)


def request(*datums: DatumArrays, loss_fn: str = "cross_entropy", **config: float | str) -> PassBody:
    return PassBody(datums or (datum(loss_fn=loss_fn),), loss_fn, config, forward_only=False)


def refusal(body: PassBody) -> str:
    with pytest.raises(Invalid) as refused:
        check_pass(body, POOL)
    return str(refused.value)


@pytest.mark.parametrize("loss_fn", NEEDS_BY_LOSS)
def test_every_loss_accepts_its_own_inputs(loss_fn: str) -> None:
    check_pass(request(loss_fn=loss_fn), POOL)


@pytest.mark.parametrize("loss_fn", NEEDS_BY_LOSS)
def test_every_required_input_is_required(loss_fn: str) -> None:
    for name in ("target_tokens", *NEEDS_BY_LOSS[loss_fn].inputs):
        whole = datum(loss_fn=loss_fn)
        inputs = {key: value for key, value in whole.inputs.items() if key != name}
        message = refusal(request(replace(whole, inputs=inputs), loss_fn=loss_fn))
        assert message == f"data[0].loss_fn_inputs.{name} is missing; {loss_fn} needs it."


def test_inputs_unused_by_a_loss_are_not_checked() -> None:
    check_pass(request(datum(mask=np.array([np.nan]))), POOL)


COLUMNS = np.array([[0, 1], [2, 3], [4, 5]])
FOREIGN = DatumArrays(np.arange(3), {"labels": np.arange(3)})
#: Requests by their defect, each with its refusal.
REFUSED = {
    "an unknown loss": (
        replace(request(), loss_fn="nope"),
        "loss_fn 'nope' is not known. Known: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, "
        "reinforce, grpo, dapo, sapo.",
    ),
    "no datums": (replace(request(), datums=()), "data is empty; send at least one datum."),
    "a token outside the vocabulary": (
        request(datum(), replace(datum(), tokens=np.array([1, 512, 3]))),
        "Token id 512 at datum 1, position 1 is outside the vocabulary (0..511).",
    ),
    "a target in columns outside the vocabulary": (
        request(datum(target_tokens=COLUMNS + 510 * (COLUMNS == 3), weights=np.ones((3, 2)))),
        "Target token id 513 at datum 0, position 1, 1 is outside the vocabulary (0..511).",
    ),
    "an input under a foreign name": (
        request(FOREIGN),
        "data[0].loss_fn_inputs.target_tokens is missing; cross_entropy needs it. No loss reads labels.",
    ),
    "an empty datum": (request(datum(), datum(0)), "Datum 1 has 0 tokens; tiny/model reads 1 to 64."),
    "a datum longer than the context": (
        request(datum(), datum(65)),
        "Datum 1 has 65 tokens; tiny/model reads 1 to 64.",
    ),
    "fewer targets than tokens": (
        request(datum(target_tokens=np.arange(2))),
        "data[0].loss_fn_inputs.target_tokens has shape [2], but the input has 3 tokens.",
    ),
    "weights of another shape than targets": (
        request(datum(weights=np.ones((3, 2)))),
        "data[0].loss_fn_inputs.weights has shape [3, 2], but target_tokens has [3].",
    ),
    "columns for another loss than cross_entropy": (
        request(datum(loss_fn="ppo", target_tokens=COLUMNS), loss_fn="ppo"),
        "data[0].loss_fn_inputs.target_tokens has shape [3, 2], but the input has 3 tokens.",
    ),
    "a setting of another loss": (
        request(loss_fn="ppo", beta=0.1),
        "loss_fn_config.beta is not a setting of ppo. "
        "Known: clip_high_threshold, clip_low_threshold, importance_cap, sequence_mask_above.",
    ),
    "crossed clip thresholds": (
        request(loss_fn="ppo", clip_low_threshold=1.2, clip_high_threshold=0.8),
        "loss_fn_config.clip_low_threshold is above clip_high_threshold.",
    ),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_field_and_its_limit(body: PassBody, message: str) -> None:
    assert refusal(body) == message


def test_targets_of_cross_entropy_may_have_columns() -> None:
    check_pass(request(datum(target_tokens=COLUMNS, weights=np.ones((3, 2)))), POOL)


@pytest.mark.parametrize("token", [-1, -100, 512, 2**31, 2**62])
def test_targets_must_be_in_the_vocabulary_too(token: int) -> None:
    bad = datum(target_tokens=np.array([0, 1, token]))
    assert refusal(request(bad)) == (
        f"Target token id {token} at datum 0, position 2 is outside the vocabulary (0..511)."
        + (" Targets of -100 are not ignored here: give them weight 0 and any token id.") * (token == -100)
    )


def test_a_datum_that_does_not_fit_into_memory_is_refused_with_the_longest() -> None:
    small = replace(POOL, memory_tokens=40)
    check_pass(request(datum(40)), small)
    with pytest.raises(Invalid, match=r"Datum 0 has 41 tokens; the longest datum that fits .* has 40"):
        check_pass(request(datum(41)), small)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_number_is_named_by_datum_and_position(value: float) -> None:
    bad = datum(loss_fn="ppo", advantages=np.array([0, value, 0], np.float32))
    message = refusal(request(datum(loss_fn="ppo"), bad, loss_fn="ppo"))
    assert message == "data[1].loss_fn_inputs.advantages[1] is not finite."


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, "0.8", 3.5e38])
def test_a_loss_setting_must_be_a_valid_number(value: float | str) -> None:
    message = refusal(request(loss_fn="ppo", clip_low_threshold=value))
    assert message == "loss_fn_config.clip_low_threshold must be a finite number, 0 or more."


@pytest.mark.parametrize("loss_fn", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        ({"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "clip_high_threshold=0.2"),
        ({"clip_high_threshold": 0.99}, "clip_high_threshold=0.99"),
        ({"clip_low_threshold": 1.01}, "clip_low_threshold=1.01"),
    ],
)
def test_bounds_that_prevent_any_training_are_refused(loss_fn: str, bounds: dict[str, float], name: str) -> None:
    message = refusal(request(loss_fn=loss_fn, **bounds))
    assert message.startswith(f"loss_fn_config.{name}: the ratio is 1 before the first step")
    assert "clip_low_threshold=0.8 and clip_high_threshold=1.2" in message


def test_bounds_of_cispo_need_not_enclose_1() -> None:
    check_pass(request(loss_fn="cispo", clip_high_threshold=0.5), POOL)


ids = st.one_of(st.integers(0, 511), st.integers(-(2**62), 2**62))


@given(tokens=st.lists(ids, min_size=1, max_size=70), targets=st.lists(ids, min_size=1, max_size=70))
def test_no_accepted_pass_has_a_token_outside_the_vocabulary(tokens: list[int], targets: list[int]) -> None:
    inputs = {"target_tokens": np.array(targets), "weights": np.ones(len(targets), np.float32)}
    try:
        check_pass(request(DatumArrays(np.array(tokens), inputs)), POOL)
    except Invalid:
        return
    assert len(tokens) == len(targets) <= POOL.context_length
    assert all(0 <= token < POOL.vocab_size for token in tokens + targets)


@given(weights=st.lists(st.floats(width=32), min_size=3, max_size=3))
def test_no_accepted_pass_has_a_non_finite_number(weights: list[float]) -> None:
    array = np.array(weights, np.float32)
    try:
        check_pass(request(datum(weights=array)), POOL)
    except Invalid:
        assert not np.isfinite(array).all()
    else:
        assert np.isfinite(array).all()


def test_a_rank_is_within_the_limit() -> None:
    for rank in (1, 64, 128):
        check_rank(rank, 128)
    for rank in (0, -1, 129, 10**9):
        with pytest.raises(Invalid, match=r"rank must be between 1 and 128\."):
            check_rank(rank, 128)


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay", "grad_clip_norm"])
def test_an_optimizer_setting_must_fit_in_a_float32(name: str) -> None:
    check_adam(AdamParams(**{name: 3.4e38}))
    with pytest.raises(Invalid, match=f"{name} is larger than a float32 can be"):
        check_adam(AdamParams(**{name: 3.5e38}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"grad_clip_norm": -1.0}, "grad_clip_norm must be 0, which is no limit, or more"),
        ({"eps": 1e-46}, "eps is 0 as a float32"),
        ({"eps": 0.0}, "eps must be greater than 0"),
    ],
)
def test_an_optimizer_setting_out_of_bounds_is_refused(params: dict[str, float], message: str) -> None:
    check_adam(AdamParams())
    with pytest.raises(Invalid, match=message):
        check_adam(AdamParams(**params))


def test_the_api_requires_the_inputs_that_the_engine_reads() -> None:
    engine = {name: (spec.inputs, spec.optional, frozenset(spec.defaults)) for name, spec in LOSSES.items()}
    assert engine == {name: (needs.inputs, needs.optional, needs.config) for name, needs in NEEDS_BY_LOSS.items()}


@pytest.mark.parametrize(
    ("loss_fn", "config", "named"),
    [
        ("ppo", {"importance_cap": 2.0}, "rollout_logprobs is missing; loss_fn_config.importance_cap=2.0 needs it"),
        ("grpo", {"beta": 0.04}, "reference_logprobs is missing; loss_fn_config.beta=0.04 needs it"),
        ("sapo", {"tau_negative": 0.0}, "loss_fn_config.tau_negative must be above 0"),
    ],
)  # fmt: skip
def test_a_setting_names_the_input_that_it_needs(loss_fn: str, config: dict[str, float], named: str) -> None:
    assert named in refusal(request(loss_fn=loss_fn, **config))


def test_an_optional_input_is_checked_in_every_datum() -> None:
    first = datum(loss_fn="ppo", rollout_logprobs=np.zeros(3, np.float32))
    check_pass(request(first, loss_fn="ppo", importance_cap=2.0), POOL)
    message = refusal(request(first, datum(loss_fn="ppo"), loss_fn="ppo"))
    assert message == "data[1].loss_fn_inputs.rollout_logprobs is missing; ppo needs it."


def custom(*datums: DatumArrays, **config: float | str) -> PassBody:
    graph = CustomLoss.model_validate({
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "beta", "rank": 0}],
        "graph": {"nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "placeholder", "name": "beta", "target": "beta"},
            {"op": "call_function", "name": "out", "target": "torch.sum", "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output",
             "args": [{"tuple": [{"ref": "out"}, {"dict": {}}]}]},
        ]},
    })  # fmt: skip
    return request(*datums, loss_fn="custom", **{"loss_id": encode_loss(graph), **config})


def test_a_custom_loss_reads_its_inputs_with_their_ranks() -> None:
    good = DatumArrays(np.arange(3), {"target_tokens": np.arange(3), "beta": np.ones(1, np.float32)})
    assert check_pass(custom(good), POOL) == 3 + 4  # tokens of the datum, and nodes of the graph
    wrong = {
        "beta is missing": {"target_tokens": np.arange(3)},
        "beta has shape [3], but the custom loss reads a scalar": {**good.inputs, "beta": np.ones(3)},
        "target_tokens has shape [3, 1], but the custom loss reads [3]": {
            **good.inputs,
            "target_tokens": np.zeros((3, 1), np.int64),
        },
        "beta[0] is not finite": {**good.inputs, "beta": np.array([np.nan], np.float32)},
    }
    for named, inputs in wrong.items():
        assert named in refusal(custom(good, replace(good, inputs=inputs)))
    assert "at most 32768 are allowed" in refusal(custom(*[good] * 8193))
    assert "must be {'loss_id'" in refusal(custom(good, beta=1.0))
    assert "is not an id" in refusal(custom(good, loss_id="loss-"))


MIXTURE = replace(POOL, expert_choices=(2, 2, 6))


def experts(**changes: int) -> np.ndarray:
    """Return valid experts of 3 tokens, but for one at [2, 1, 0]."""
    given = np.tile(np.array([4, 1], np.int8), (3, 2, 1))
    given[2, 1, 0] = changes.get("one", 4)
    return given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (experts(one=6), "[2, 1, 0] is 6, but must be an expert (0..5), or -1 for the router's own choice."),
        (experts(one=-2), "[2, 1, 0] is -2, but must be an expert (0..5), or -1"),
        (experts(one=1), "[2, 1] names an expert twice."),
        (experts(one=-1), "[2, 1] must be -1 for all experts or for none."),
        (experts()[:2], " has shape [2, 2, 2], but must be [3, 2, 2]: tokens of the input, layers with experts"),
        (experts()[:, :1], " has shape [3, 1, 2], but must be [3, 2, 2]"),
        (experts()[..., :1], " has shape [3, 2, 1], but must be [3, 2, 2]"),
        (experts()[0], " has shape [2, 2], but must be [3, 2, 2]"),
    ],
)  # fmt: skip
def test_impossible_experts_are_refused(given: np.ndarray, message: str) -> None:
    body = request(datum(), replace(datum(), routed_experts=given))
    with pytest.raises(Invalid) as refused:
        check_pass(body, MIXTURE)
    assert str(refused.value).startswith(f"data[1].loss_fn_inputs.routed_experts{message}")


def test_experts_may_be_given_for_some_tokens() -> None:
    given = experts()
    given[1] = -1
    body = request(replace(datum(), routed_experts=given))
    check_pass(body, MIXTURE)
    assert refusal(body) == (
        "data[0].loss_fn_inputs.routed_experts: tiny/model has no experts to choose from. Leave it out."
    )
