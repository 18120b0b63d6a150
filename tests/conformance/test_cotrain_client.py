"""Our own client through the same server."""

from __future__ import annotations

import asyncio
import math
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cotrain import (
    AdamParams,
    AuthenticationError,
    BadRequestError,
    Datum,
    ModelInput,
    NotFoundError,
    RequestFailed,
    ServiceClient,
    TrainingClient,
)
from cotrain.types import ForwardBackwardOutput
from tests.conformance.running import KEYS, LOSES_ANSWERS_OF, Server
from tests.support.draws import variant
from tests.support.lossy_proxy import LossyProxy
from tests.support.waiting import PATIENCE_S

VOCAB = 512


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


def test_training_lowers_the_loss(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    before = logprobs(run.forward(BATCH, "cross_entropy").result())
    after = train(run, steps=8)
    assert sum(map(sum, after)) > 0.5 * sum(map(sum, before))  # both are negative
    assert run.get_info().lora_rank == 4


def test_threads_and_coroutines_train_the_same(service: ServiceClient, server: Server) -> None:
    async def train_async() -> list[list[float]]:
        run = await service.create_lora_training_client_async(server.base_model, rank=4, seed=1)
        for _ in range(3):
            await run.forward_backward_async(BATCH, "cross_entropy")
            await run.optim_step_async(AdamParams(learning_rate=1e-2))
        return logprobs(await (await run.forward_async(BATCH, "cross_entropy")))

    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    assert asyncio.run(train_async()) == train(run)


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
        variant(
            *(1300, [1, 2], [1.0, math.nan]),
            r"data\[1300\].loss_fn_inputs.weights\[1\] is not finite",
        ),
        variant(0, [1, 2], [3e38, 3e38], "Loss is not finite"),
        (1499, [1, 2], [3e38, 3e38], "Loss is not finite"),
    ],
)
def test_a_large_pass_that_fails_adds_nothing(
    service: ServiceClient,
    server: Server,
    bad: int,
    targets: list[int],
    weights: list[float],
    named: str,
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=1)
    data = [datum(2, seed=index) for index in range(1500)]
    data[bad] = Datum(
        model_input=data[bad].model_input,
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    with pytest.raises(RequestFailed, match=named):
        run.forward_backward(data, "cross_entropy").result()
    assert (run.optim_step().result().metrics or {})["grad_norm"] == 0.0


def test_a_failed_request_leaves_the_run_going(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    with pytest.raises(RequestFailed, match="no_such_loss") as caught:
        run.forward_backward(BATCH, "no_such_loss").result()
    assert caught.value.category == "user"
    assert run.forward(BATCH, "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_lost_answer_changes_no_bit(service: ServiceClient, server: Server) -> None:
    undisturbed = train(service.create_lora_training_client(server.base_model, rank=3, seed=9))
    with (
        LossyProxy(server.address, LOSES_ANSWERS_OF) as proxy,
        ServiceClient(proxy.address, KEYS[0]) as far_service,
    ):
        far = train(far_service.create_lora_training_client(server.base_model, rank=3, seed=9))
    assert proxy.lost.count("forward_backward") == 4
    assert far == undisturbed


def test_what_is_compressed_on_its_way_trains_the_same(
    service: ServiceClient, server: Server
) -> None:
    data = [datum(100, seed=seed) for seed in range(4)]
    near = service.create_lora_training_client(server.base_model, rank=3, seed=9)
    with (
        LossyProxy(server.address, []) as proxy,
        ServiceClient(proxy.address, KEYS[0]) as far_service,
    ):
        far = far_service.create_lora_training_client(server.base_model, rank=3, seed=9)
        far_output = far.forward(data, "cross_entropy").result()
    assert ("forward_backward", "zstd") in proxy.encodings
    assert (
        far_output.loss_fn_outputs == near.forward(data, "cross_entropy").result().loss_fn_outputs
    )


def test_many_runs_at_once_train_bit_for_bit_as_if_alone(
    service: ServiceClient, server: Server
) -> None:
    def train_rank(rank: int) -> list[list[float]]:
        run = service.create_lora_training_client(server.base_model, rank=rank, seed=rank)
        return train(run)

    ranks = [1, 3, 8]
    alone = [train_rank(rank) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(train_rank, ranks)) == alone


def test_an_unloaded_run_takes_no_more_requests(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    run.unload()
    with pytest.raises(BadRequestError, match="unloaded"):
        run.optim_step().result()


@pytest.mark.parametrize("endpoint", ["get_info", "unload_model", "optim_step"])
def test_another_tenants_run_does_not_exist(
    service: ServiceClient, server: Server, endpoint: str
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    answer = httpx.post(
        f"{server.address}/api/v1/{endpoint}",
        headers={"X-API-Key": KEYS[1]},
        json={"model_id": run.model_id, "seq_id": 1, "adam_params": {}},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 404
    assert answer.json()["detail"] == "Training run not found."


def test_another_tenants_checkpoint_is_loaded_with_its_key(
    service: ServiceClient, server: Server
) -> None:
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


def test_another_tenants_result_does_not_exist(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=2)
    run.optim_step().result()
    answers = [
        httpx.post(
            f"{server.address}/api/v1/retrieve_future",
            headers={"X-API-Key": key},
            json={"request_id": f"{run.model_id}:1"},
            timeout=PATIENCE_S,
        )
        for key in KEYS
    ]
    assert [answer.status_code for answer in answers] == [200] + [404] * (len(KEYS) - 1)


def test_a_wrong_key_opens_nothing(server: Server) -> None:
    with (
        ServiceClient(server.address, "tml-one_wrong") as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.create_lora_training_client(server.base_model)


def test_a_base_model_that_is_not_served_is_refused(service: ServiceClient) -> None:
    with pytest.raises((BadRequestError, NotFoundError), match="not served here"):
        service.create_lora_training_client("no/such-model")
