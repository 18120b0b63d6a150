from __future__ import annotations

import asyncio
import builtins
import math
import threading
from array import array
from typing import Any, SupportsFloat

import pytest
import torch

from cotrain import BadRequestError, Datum, ModelInput, RequestFailed, TorchMissing, TrainingClient, UnsupportedInput
from cotrain.clients import custom_loss
from cotrain.losses import orpo
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi, refusal
from tests.support.waiting import until

Loss = tuple[Any, dict[str, SupportsFloat]]


def datum(token: int, advantage: float) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([token]),
        loss_fn_inputs={"target_tokens": [token + 1], "advantages": [advantage]},
    )


DATA = [datum(5, 2.0), datum(7, 3.0)]


def weights_of(message: wire.ForwardBackwardRequest) -> list[list[float]]:
    return [array("f", d.loss_fn_inputs["weights"].dense).tolist() for d in message.data]


def linear(data: list[Datum], rows: list[torch.Tensor]) -> Loss:
    advantages = [d.loss_fn_inputs["advantages"].to_torch() for d in data]
    loss = -sum((a * row).sum() for a, row in zip(advantages, rows, strict=True))
    return loss, {"rows": len(rows), "half": torch.tensor(0.5)}


def test_the_backward_pass_carries_the_negated_gradients_of_the_loss(api: FakeApi, run: TrainingClient) -> None:
    output = run.forward_backward_custom(DATA, linear).result()

    forward, backward = api.passes["pass:1"], api.passes["pass:2"]
    assert (forward.forward_only, backward.forward_only) == (True, False)
    assert (forward.loss_fn, backward.loss_fn) == ("cross_entropy", "cross_entropy")
    assert weights_of(forward) == [[0.0], [0.0]]
    assert weights_of(backward) == [[2.0], [3.0]]
    assert {"target_tokens", "weights"} == set(backward.data[0].loss_fn_inputs)
    assert output.metrics["surrogate_loss:sum"] == 2  # metric that the fake server returns for two datums
    assert (output.metrics["rows"], output.metrics["half"]) == (2.0, 0.5)
    assert output.loss == output.metrics["loss:sum"]


def test_a_request_sent_during_a_custom_loss_follows_both_passes(api: FakeApi, run: TrainingClient) -> None:
    may_end = threading.Event()

    def slow(data: list[Datum], rows: list[torch.Tensor]) -> Loss:
        assert may_end.wait(120)
        return linear(data, rows)

    custom = run.forward_backward_custom(DATA, slow)
    step = run.optim_step()
    step.result()
    assert not custom.done()
    assert list(api.passes) == ["pass:1"]
    may_end.set()
    custom.result()
    assert list(api.passes) == ["pass:1", "pass:2"]
    assert api.bodies("optim_step")[0]["seq_id"] == 3


def test_a_large_batch_is_split_alike_in_both_passes(api: FakeApi, run: TrainingClient) -> None:
    output = run.forward_backward_custom([DATA[1]] * 1030, linear).result()
    sizes = {name: len(message.data) for name, message in api.passes.items()}
    assert sizes == {"pass:1": 1024, "pass:2": 6, "pass:3": 1024, "pass:4": 6}
    assert len(output.loss_fn_outputs) == 1030


def test_a_datum_left_out_of_the_loss_gets_no_gradient(api: FakeApi, run: TrainingClient) -> None:
    run.forward_backward_custom(DATA, lambda _, rows: (rows[1].sum(), {})).result()
    assert weights_of(api.passes["pass:2"]) == [[0.0], [-1.0]]


def test_a_loss_that_raises_fails_its_future_and_the_run_continues(api: FakeApi, run: TrainingClient) -> None:
    def broken(data: list[Datum], rows: list[torch.Tensor]) -> Loss:
        raise ZeroDivisionError("my own mistake")

    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        run.forward_backward_custom(DATA, broken).result()
    filler = api.passes["pass:2"]
    assert (filler.forward_only, len(filler.data)) == (True, 0)
    assert run.forward([DATA[0]], "cross_entropy").result().metrics["clock_cycle:unique"] == 3


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda _, rows: rows[0].sum(), TypeError, r"return \(loss, metrics\)"),
        (lambda _, rows: (rows[0].detach().sum(), {}), ValueError, "depends on the log-probs"),
        (lambda *_: (1.0, {}), ValueError, "depends on the log-probs"),
        (lambda _, rows: (torch.cat(rows), {}), ValueError, r"one number, not a tensor of shape \[2\]"),
        (lambda _, rows: (rows[0].sum() + math.inf, {}), RequestFailed, "the custom loss is inf"),
        (lambda _, rows: (rows[0].sum() * math.nan, {}), RequestFailed, "the custom loss is nan"),
        (
            lambda _, rows: ((rows[1] - rows[1]).sum().sqrt(), {}),
            RequestFailed,
            r"not finite at the log-probs of data\[1\]",
        ),
    ],
)
def test_an_unusable_loss_raises_an_error_with_the_remedy(
    run: TrainingClient, loss: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run.forward_backward_custom(DATA, loss).result()


def test_a_rejected_forward_leaves_no_gap(api: FakeApi, run: TrainingClient) -> None:
    api.answers["forward_backward"] = [refusal(400, "too odd")]
    with pytest.raises(BadRequestError, match="too odd"):
        run.forward_backward_custom(DATA, linear).result()
    assert [len(api.passes[f"pass:{seq}"].data) for seq in (1, 2)] == [0, 0]


def test_a_cancelled_result_leaves_no_gap(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()
    future = run.forward_backward_custom(DATA, linear)
    assert future.cancel()
    gate.set()
    asyncio.run(until(lambda: "pass:2" in api.passes))
    assert weights_of(api.passes["pass:2"]) == [[2.0], [3.0]]


def test_both_passes_are_numbered_after_the_first_await(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()

    async def train() -> float:
        future = await run.forward_backward_custom_async(DATA, linear)
        assert "pass:1" in api.passes
        assert not future.done()
        gate.set()
        return (await future).loss

    assert asyncio.run(train()) == asyncio.run(run.forward_backward_custom_async(DATA, linear).result_async()).loss


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "at least one datum"),
        ([DATA[0], Datum(model_input=ModelInput.from_ints([1]))], r"data\[1\].*target_tokens"),
        (DATA[0], "one Datum; give a list"),
    ],
)
def test_input_without_a_possible_loss_takes_no_number(
    api: FakeApi, run: TrainingClient, data: Any, words: str
) -> None:
    with pytest.raises(UnsupportedInput, match=words):
        run.forward_backward_custom(data, linear)
    run.forward([DATA[0]], "cross_entropy").result()
    assert list(api.passes) == ["pass:1"]


def test_without_torch_the_error_says_what_to_install(run: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torch(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(custom_loss, "import_module", no_torch)
    with pytest.raises(TorchMissing, match="pip install torch") as missing:
        run.forward_backward_custom(DATA, linear)
    assert isinstance(missing.value, builtins.ImportError)


def test_orpo_equals_its_published_formula() -> None:
    """Against plain Python in float64, to 1e-9."""
    rows = [[-9.0, -0.5, -1.0], [-9.0, -2.0, -0.3], [-1.0, -0.2], [-4.0, -3.0]]
    masks = [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    data = [
        Datum(
            model_input=ModelInput.from_ints([1] * len(mask)),
            loss_fn_inputs={"target_tokens": [2] * len(mask), "weights": mask},
        )
        for mask in masks
    ]
    logprobs = [torch.tensor(row, dtype=torch.float64) for row in rows]
    loss, metrics = orpo(weight=0.25)(data, logprobs)

    means = [sum(lp for lp, w in zip(*each, strict=True) if w) / sum(each[1]) for each in zip(rows, masks, strict=True)]
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in means]
    margins = [odds[0] - odds[1], odds[2] - odds[3]]
    ratio = -sum(math.log(1 / (1 + math.exp(-margin))) for margin in margins)
    assert loss.item() == pytest.approx(-means[0] - means[2] + 0.25 * ratio, abs=1e-9)
    assert metrics == pytest.approx({"margin:mean": sum(margins) / 2, "odds_ratio:sum": ratio}, abs=1e-9)
    with pytest.raises(UnsupportedInput, match="pairs of datums, not 3"):
        orpo()(data[:3], logprobs[:3])
    with pytest.raises(UnsupportedInput, match=r"data\[0\].loss_fn_inputs.weights mark no answer"):
        orpo()(DATA, logprobs[:2])
