"""Server that is unreachable for longer than a request is retried: later requests keep their order."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from cotrain import Datum, ModelInput, ServiceClient, TrainingClient
from cotrain.errors import APIConnectionError, APIError
from cotrain.transport.responses import RetryPolicy
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi, refusal

DATUM = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={})
NEVER_AGAIN = RetryPolicy(give_up_after_s=-1.0)


@pytest.fixture
def run(api: FakeApi) -> Iterator[TrainingClient]:
    with ServiceClient("http://server", "k", network=api.network, policy=NEVER_AGAIN) as service:
        yield service.create_lora_training_client("m")


def passes(api: FakeApi) -> list[tuple[int, int]]:
    """Return the number and the datum count of every pass that was sent."""
    sent = [call for call in api.calls if call.url.path.endswith("/forward_backward")]
    messages = [wire.ForwardBackwardRequest.FromString(call.content) for call in sent]
    return [(message.seq_id, len(message.data)) for message in messages]


@pytest.mark.parametrize("trouble", [httpx.ConnectError("gone"), refusal(503)])
def test_a_number_that_may_be_lost_is_filled_before_the_next_is_sent(
    api: FakeApi, run: TrainingClient, trouble: httpx.Response | Exception
) -> None:
    api.answers["optim_step"] = [trouble]
    with pytest.raises(APIError):
        run.optim_step().result()
    run.forward([DATUM], "cross_entropy").result()
    run.forward([DATUM], "cross_entropy").result()
    assert passes(api) == [(1, 0), (2, 1), (3, 1)]


def test_a_number_that_arrived_is_not_changed(api: FakeApi, run: TrainingClient) -> None:
    api.answers["optim_step"] = [httpx.ReadError("the answer is lost")]
    api.answers["forward_backward"] = [refusal(400, "seq 1 was already used")]
    with pytest.raises(APIError):
        run.optim_step().result()
    run.forward([DATUM], "cross_entropy").result()
    assert passes(api) == [(1, 0), (2, 1)]


def test_no_number_is_lost_while_the_server_is_unreachable(api: FakeApi, run: TrainingClient) -> None:
    api.answers["optim_step"] = [httpx.ConnectError("gone")]
    api.answers["forward_backward"] = [httpx.ConnectError("gone")] * 5
    for _ in range(2):
        with pytest.raises(APIConnectionError):
            run.optim_step().result()
    with pytest.raises(APIConnectionError):
        run.forward([DATUM], "cross_entropy").result()
    run.forward([DATUM], "cross_entropy").result()
    assert passes(api)[-4:] == [(1, 0), (2, 0), (3, 0), (4, 1)]
