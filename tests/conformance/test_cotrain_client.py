"""Our own client through the same server: large passes, many futures, compression and lent weights."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from cotrain import AdamParams, Datum, Future, ModelInput, RequestFailed, ServiceClient, TrainingClient
from cotrain.types import ForwardBackwardOutput
from tests.conformance.running import KEYS, Server
from tests.support.draws import variant
from tests.support.lossy_proxy import LossyProxy

VOCAB = 512
#: Far more than the 16 waiting requests that the narrow server accepts from a tenant. A thousand
#: futures are in tests/unit/client/requests/test_run_requests.py.
MANY = 45
#: Futures per group: 14 passes and a step. The plain loop waits for each group.
STEP_EVERY = 15
#: Time limit that detects a deadlock; it does not measure speed.
WITHIN_S = 240.0


def datum(length: int, seed: int) -> Datum:
    tokens = random.Random(seed).choices(range(VOCAB), k=length + 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


BATCH = [datum(length, seed=length) for length in (5, 9, 13, 8)]


def train(run: TrainingClient, steps: int = 3) -> list[list[float]]:
    """Train pipelined and list where the run got to."""
    for _ in range(steps):
        run.forward_backward(BATCH, "cross_entropy")
        run.optim_step(AdamParams(learning_rate=1e-2))
    return logprobs(run.forward(BATCH, "cross_entropy").result())


def logprobs(output: ForwardBackwardOutput) -> list[list[float]]:
    return [outputs["logprobs"].tolist() for outputs in output.loss_fn_outputs]


def test_1030_datums_come_back_whole(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    data = [datum(2 + index % 3, seed=index) for index in range(1030)]
    output = run.forward_backward(data, "cross_entropy").result()
    assert [len(row) for row in logprobs(output)] == [d.model_input.length for d in data]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(map(sum, logprobs(output))))


@pytest.mark.parametrize(
    ("bad", "targets", "weights", "named"),
    [
        (1499, [1, VOCAB], [1.0, 1.0], "Target token id 512 at datum 1499, position 1"),
        variant(*(1300, [1, 2], [1.0, math.nan]), r"data\[1300\].loss_fn_inputs.weights\[1\] is not finite"),
        variant(0, [1, 2], [3e38, 3e38], "Loss is not finite"),
        (1499, [1, 2], [3e38, 3e38], "Loss is not finite"),
    ],
)
def test_a_large_pass_that_fails_adds_nothing(
    service: ServiceClient, server: Server, bad: int, targets: list[int], weights: list[float], named: str
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    data = [datum(2, seed=index) for index in range(1500)]
    data[bad] = Datum(model_input=data[bad].model_input, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    with pytest.raises(RequestFailed, match=named):
        run.forward_backward(data, "cross_entropy").result()
    assert (run.optim_step().result().metrics or {})["grad_norm"] == 0.0


def test_what_is_compressed_on_its_way_trains_the_same(service: ServiceClient, server: Server) -> None:
    data = [datum(100, seed=seed) for seed in range(4)]
    near = service.create_lora_training_client(server.base_model, rank=3, seed=9)
    with LossyProxy(server.address, []) as proxy, ServiceClient(proxy.address, KEYS[0]) as far_service:
        far = far_service.create_lora_training_client(server.base_model, rank=3, seed=9)
        far_output = far.forward(data, "cross_entropy").result()
    assert ("forward_backward", "zstd") in proxy.encodings
    assert far_output.loss_fn_outputs == near.forward(data, "cross_entropy").result().loss_fn_outputs


def test_another_tenants_checkpoint_is_loaded_with_its_key(service: ServiceClient, server: Server) -> None:
    owner = service.create_lora_training_client(server.base_model, rank=2, seed=1)
    expected = train(owner)
    path = owner.save_state("lent").result().path
    with ServiceClient(server.address, KEYS[1]) as other_service:
        run = other_service.create_lora_training_client(server.base_model, rank=2, seed=2)
        with pytest.raises(RequestFailed, match="not found"):
            run.load_state(path).result()
        run.load_state(path, weights_access_token=KEYS[0])
        assert logprobs(run.forward(BATCH, "cross_entropy").result()) == expected


def test_weights_for_elsewhere_have_a_size(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    saved = run.save_weights_external("out", ttl_seconds=3600).result()
    assert (saved.path or "").endswith("/out")
    assert (saved.size_bytes or 0) > 1_000


def send(run: TrainingClient, index: int) -> Future[Any]:
    if index % STEP_EVERY == STEP_EVERY - 1:
        return run.optim_step(AdamParams(learning_rate=1e-2))
    return run.forward_backward([datum(1 + index % 7, seed=index)], "cross_entropy")


def told(result: Any) -> object:
    """Return the content of a result without its times."""
    metrics = {name: value for name, value in result.metrics.items() if "clock_cycle" not in name}
    outputs = getattr(result, "loss_fn_outputs", [])
    return metrics, [output["logprobs"].tolist() for output in outputs]


def one_group_at_a_time(run: TrainingClient) -> list[object]:
    results = []
    for start in range(0, MANY, STEP_EVERY):
        futures = [send(run, index) for index in range(start, start + STEP_EVERY)]
        results += [told(future.result(WITHIN_S)) for future in reversed(futures)][::-1]
    return results


def test_many_futures_give_the_results_of_the_plain_loop(narrow_server: Server) -> None:
    with ServiceClient(narrow_server.address, KEYS[0]) as service:
        runs = [service.create_lora_training_client(narrow_server.base_model, rank=2, seed=1) for _ in range(2)]
        expected = one_group_at_a_time(runs[0])
        futures = [send(runs[1], index) for index in range(MANY)]
        assert [told(future.result(WITHIN_S)) for future in futures] == expected
