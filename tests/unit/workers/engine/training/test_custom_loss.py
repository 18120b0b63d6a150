"""Custom losses: graphs of tenants against the same functions in torch, their limits, and their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.clients.custom_loss import trace
from cotrain.wire import custom_loss as wire
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Failure, LossGraph, Op, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training import custom_loss
from cotrain_workers.engine.training.custom_loss import broken_datum
from cotrain_workers.engine.training.losses import loss_of, value_and_slope
from cotrain_workers.op_codec import loss_graph
from tests.support.training import MIX, random_datum

Loss = Callable[..., tuple[Any, dict[str, Any]]]
POLICY = {"logprobs": 1, "q": 1, "advantages": 1, "group": 1, "beta": 0}


def policy(logprobs: Any, q: Any, advantages: Any, group: Any, beta: Any) -> Any:
    """Compute a clipped loss with a KL term, from operators, functions, methods, slices and constants."""
    ratio = torch.exp(logprobs - q)
    kept = torch.where((advantages != 0) & (group > 0), logprobs, 0.0)[1:]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    far = torch.nn.functional.logsigmoid(beta * (logprobs - q)).mean()
    loss = -surrogate.sum() / logprobs.shape[0] + far - 2 ** kept.mean() + logprobs.max()
    return loss, {"custom/far:mean": far.detach(), "custom/above:sum": (ratio > 1).float().sum()}


def graph_of(fn: Loss, ranks: dict[str, Any] | None = None) -> LossGraph:
    return loss_graph(wire.encode_loss(trace(fn, ranks or {"logprobs": 1})))


def datum(length: int, seed: int = 0) -> Datum:
    rng = np.random.default_rng(seed)
    plain = random_datum(rng, "importance_sampling", length)
    return Datum(plain.tokens, {
        "target_tokens": plain.inputs["target_tokens"], "q": plain.inputs["logprobs"],
        "advantages": plain.inputs["advantages"], "group": rng.integers(0, 2, length),
        "beta": np.array([0.1], np.float32),
    })  # fmt: skip


def custom(run: str, seq: int, datums: list[Datum], graph: LossGraph, *, needs_grad: bool = True) -> Pass:
    return Pass(run, seq, datums, "custom", {}, needs_grad, graph=graph)


def test_the_allowed_operations_are_those_of_the_wire() -> None:
    assert set(custom_loss.FUNCTIONS) == wire.FUNCTIONS
    assert custom_loss.METHODS == wire.METHODS


def test_a_graph_has_the_loss_and_the_derivative_of_its_function() -> None:
    """In float64, with a tolerance of 0: the same operations on the same numbers."""
    datums = [datum(7), datum(3, seed=1)]
    op = custom("a", 1, datums, graph_of(policy, POLICY))
    logprobs = torch.from_numpy(np.random.default_rng(2).normal(-3, 1, (10, 1)))
    loss, slope = value_and_slope(loss_of(op, datums), logprobs, {}, {})

    leaf = logprobs[:, 0].clone().requires_grad_()
    plain = []
    for each, rows in zip(datums, leaf.split([7, 3]), strict=True):
        floats = [torch.from_numpy(each.inputs[name]).double() for name in ("q", "advantages")]
        group = torch.from_numpy(each.inputs["group"])
        plain.append(policy(rows, floats[0], floats[1], group, torch.tensor(0.1))[0])
    torch.stack(plain).sum().backward()
    assert loss.item() == pytest.approx(sum(each.item() for each in plain), abs=1e-8)  # 0.1 is a float32 there
    assert leaf.grad is not None
    torch.testing.assert_close(slope[:, 0], leaf.grad, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda logprobs: (logprobs[9], {}), "node 'getitem' (operator.getitem): index 9 is out of bounds"),
        (lambda logprobs: (logprobs * 2, {}), "the loss must be a tensor without axes, not [4]"),
        (lambda logprobs: (logprobs.sum(), {"custom/x:sum": logprobs}), "custom/x:sum must be a tensor without axes"),
        (lambda logprobs: (logprobs.detach().sum(), {}), "the loss does not depend on logprobs"),
        (lambda logprobs: (torch.zeros(logprobs.shape[0] * 10**12).sum() + logprobs.sum(), {}), "its values and those before it have more than"),
        (lambda logprobs: (logprobs.expand(10**9, 4).sum(), {}), "its values and those before it have more than"),
        (lambda logprobs: (torch.arange(0, logprobs.shape[0], 1e-12).sum() + logprobs.sum(), {}), "(torch.arange): its values"),
        (lambda logprobs: (torch.arange(logprobs.sum().detach() * -1e12).sum() + logprobs.sum(), {}), "(torch.arange): its values"),
        (lambda logprobs: (logprobs.new_zeros(logprobs.shape[0], logprobs.argmax() + 10**12).sum()
                           + logprobs.sum(), {}), "(new_zeros): its values"),
        (lambda logprobs: (torch.outer(*[torch.zeros(logprobs.shape[0] * 2000)] * 2).sum()
                           * logprobs.sum(), {}), "(torch.outer): its values"),
        (lambda logprobs: (logprobs.sum() * logprobs.shape[0] ** (10**8), {}), "(operator.pow): math range error"),
        (lambda logprobs: (logprobs.sum() * (logprobs.shape * 10**9)[0], {}), "must be tensors or numbers"),
        (lambda logprobs: (torch.log(logprobs).sum(), {}), "The loss of data[0] is nan."),
    ],
)  # fmt: skip
def test_a_graph_that_fails_names_its_node_and_datum(fn: Loss, named: str) -> None:
    found = [np.full(4, -1.0, np.float32)]
    assert named in broken_datum(graph_of(fn), [datum(4)], found, needs_grad=True)


def test_a_custom_loss_leaves_its_neighbours_bits_and_fails_alone(new_engine: Callable[..., Engine]) -> None:
    """Its runs are alone, then in a mix with a run of an impossible graph and one of NaN."""
    own = custom("a", 1, [datum(9), datum(30, 1)], graph_of(policy, POLICY))
    ours: list[Op] = [Create("a", 0, AdapterSpec(4, 1)), own]
    bad: dict[str, Loss] = {
        "nan": lambda logprobs: (logprobs.sqrt().sum(), {}),
        "impossible": lambda logprobs: (logprobs[99].sum(), {}),
    }
    theirs: list[Op] = []
    for run, fn in bad.items():
        theirs += [Create(run, 0, AdapterSpec(4, 2)), custom(run, 1, [datum(12)], graph_of(fn))]
    neighbours = [op for tenant in MIX[:3] for op in tenant.ops(0)]

    settings = {"micro_batch_tokens": 48}
    alone = new_engine(**settings).run(ours)
    quiet = new_engine(**settings).run(neighbours)
    mixed_engine = new_engine(**settings)
    mixed = mixed_engine.run([*theirs, *ours, *neighbours])

    for key, expected in {**alone.outputs, **quiet.outputs}.items():
        answer = mixed.outputs[key]
        if isinstance(expected, PassOutput):
            assert isinstance(answer, PassOutput)
            assert (answer.loss_sum, answer.drift) == (expected.loss_sum, expected.drift)
            for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
                np.testing.assert_array_equal(one, other)
        else:
            assert answer == expected
    failed = {run: mixed.outputs[run, 1] for run in bad}
    assert all(isinstance(each, Failure) and each.category == "user" for each in failed.values())
    assert "The loss of data[0] is nan" in failed["nan"].message  # type: ignore[union-attr]
    assert "index 99 is out of bounds" in failed["impossible"].message  # type: ignore[union-attr]
    output = mixed.outputs["a", 1]
    assert isinstance(output, PassOutput)
    above = [int((now > each.inputs["q"]).sum()) for now, each in zip(output.logprobs, own.datums, strict=True)]
    assert output.drift["custom/above:sum"] == sum(above)
