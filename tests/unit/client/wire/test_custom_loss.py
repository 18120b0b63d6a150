"""Custom losses on the wire: allowed graphs, refusals that name the node, and hostile ids."""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64encode
from typing import Any

import pytest
import torch

from cotrain import UnsupportedInput
from cotrain.clients.custom_loss import PerDatumLossFn, trace
from cotrain.wire.custom_loss import MAX_NODES, PREFIX, CustomLoss, check_loss, decode_loss, encode_loss


def likely(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs[..., :-1] * weights[..., 1:]).clamp(min=float("-inf")).to(torch.float64).sum()
    return loss, {"custom/loss:mean": loss.detach()}


LIKELY = trace(likely, {"logprobs": 1, "weights": 1})


def packed(plain: bytes) -> str:
    return PREFIX + urlsafe_b64encode(zlib.compress(plain)).decode()


def test_an_id_contains_the_whole_loss() -> None:
    assert decode_loss(encode_loss(LIKELY)) == LIKELY


@pytest.mark.parametrize(
    "loss_id",
    ["", "loss-", "loss-é", "loss-AAAA", "x" * 100_000, packed(b"{}"), packed(b"[" * 200_000), packed(b" " * 10**8)],
)
def test_an_invented_id_is_refused(loss_id: str) -> None:
    with pytest.raises(UnsupportedInput, match="is not an id that create_custom_loss returned"):
        decode_loss(loss_id)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda logprobs: (logprobs.tolist(), {}), r"node 'tolist': Tensor.tolist is not allowed.*keep every value"),
        (lambda logprobs: (logprobs @ logprobs, {}), r"operator.matmul is not allowed in a custom loss; use \(a \* b\)"),
        (lambda logprobs: (torch.load(logprobs), {}), "cannot be traced"),
        (lambda logprobs: (torch.rand_like(logprobs).sum(), {}), r"torch.rand_like is not allowed"),
        (lambda logprobs: (torch.zeros(logprobs.shape, device=torch.device("cuda")).sum(), {}), "the server decides"),
        (lambda logprobs: (logprobs.data.sum(), {}), "allowed attributes are T, dtype, ndim, shape"),
        (lambda logprobs: (logprobs + torch.ones(3), {}), r"reads logprobs and its inputs only"),
        (lambda logprobs: (torch.exp(logprobs, out=logprobs).sum(), {}), "must not change its arguments"),
        (lambda logprobs: (logprobs.to("cuda:0").sum(), {}), "'cuda:0' is no argument of a custom loss"),
        (lambda logprobs: (logprobs.sum(), {"loss": logprobs.sum()}), "metric 'loss' must be named custom/<name>:sum"),
        (lambda logprobs: logprobs.sum(), r"must return \(loss, metrics\)"),
        (lambda logprobs: (logprobs if logprobs[0] > 0 else -logprobs, {}), "cannot be traced"),
        (lambda logprobs: (sum(logprobs * i for i in range(200)), {}), f"at most {MAX_NODES} items"),
    ],
)  # fmt: skip
def test_an_operation_that_is_not_allowed_is_named(fn: PerDatumLossFn, named: str) -> None:
    with pytest.raises(UnsupportedInput, match=named):
        trace(fn, {"logprobs": 1})


def test_ranks_are_those_of_the_parameters() -> None:
    with pytest.raises(UnsupportedInput, match=r"the parameters are \['logprobs', 'weights'\]"):
        trace(likely, {"logprobs": 1})


@pytest.mark.parametrize(
    ("at", "change", "named"),
    [
        (0, {"target": "weights"}, "graph has the placeholders"),
        (0, {"args": [1]}, "an input has no default"),
        (2, {"op": "get_attr"}, "reads logprobs and its inputs only"),
        (2, {"op": "call_module"}, "modules are not allowed"),
        (2, {"target": "os.system"}, "os.system is not allowed"),
        (2, {"args": [{"ref": "later"}]}, "'later' is no earlier node"),
        (2, {"args": [{"ref": "logprobs", "and": 1}]}, "is no known argument"),
        (2, {"args": [[[[[[[[1]]]]]]]]}, "nested too deeply"),
        (2, {"name": "logprobs"}, "two nodes 'logprobs'|no earlier node"),
        (-1, {"op": "call_function", "target": "torch.exp"}, "must end in its only output"),
    ],
)
def test_a_forged_graph_is_refused(at: int, change: dict[str, Any], named: str) -> None:
    plain = LIKELY.model_dump()
    plain["graph"]["nodes"][at] |= change
    with pytest.raises(UnsupportedInput, match=named):
        check_loss(CustomLoss.model_validate(plain))
