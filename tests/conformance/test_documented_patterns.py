"""Code patterns that the hosted services document, run on our server.

Each block makes the same calls in the same order, rewritten in our own words; only the imported
name differs. Each must return the numbers of the plainest loop, `losses_one_by_one`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest

import cotrain as bios
import cotrain as mint
import cotrain as tinker
from cotrain import types
from cotrain.exceptions import BiosAPIError
from tests.conformance.running import KEYS, Server

Batch = Sequence[types.Datum]

VOCAB = 512
LOSS = "cross_entropy"
ADAM = types.AdamParams(learning_rate=1e-2)


def make_batch(seed: int) -> Batch:
    tokens = random.Random(seed).choices(range(VOCAB), k=9)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
        )
    ]


BATCHES = [make_batch(seed) for seed in range(6)]
BROKEN = [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})]


@pytest.fixture(autouse=True)
def settings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_BASE_URL", server.address)
    monkeypatch.setenv("COTRAIN_API_KEY", KEYS[0])


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(server.address, KEYS[0]) as client:
        yield client


@pytest.fixture
def client(service: tinker.ServiceClient, server: Server) -> tinker.TrainingClient:
    return service.create_lora_training_client(server.base_model, rank=4, seed=1)


@pytest.fixture(scope="module")
def losses_one_by_one(service: tinker.ServiceClient, server: Server) -> list[float]:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    losses = []
    for batch in BATCHES:
        losses.append(run.forward_backward(batch, LOSS).result().loss)
        run.optim_step(ADAM).result()
    assert len(set(losses)) == len(losses)
    return losses


def ran(work: Coroutine[Any, Any, Any]) -> Any:
    """Run an asynchronous block, with the time limit of a test."""
    return asyncio.run(asyncio.wait_for(work, timeout=600))


# ---- Tinker: async and futures, under the hood; the first two Bios documents as well --------------


def test_tinker_sync_python_and_bios_sync_api_with_futures(
    client: tinker.TrainingClient, losses_one_by_one: list[float]
) -> None:
    future = client.forward_backward(BATCHES[0], LOSS)
    assert future.result().loss == losses_one_by_one[0]


def test_tinker_async_python_and_bios_async_api_with_the_double_await(
    client: tinker.TrainingClient, losses_one_by_one: list[float]
) -> None:
    async def block() -> float:
        future = await client.forward_backward_async(BATCHES[0], LOSS)
        assert isinstance(future, tinker.Future)
        result = await future
        return result.loss

    assert ran(block()) == losses_one_by_one[0]


def test_tinker_naive_implementation(client: tinker.TrainingClient, losses_one_by_one: list[float]) -> None:
    async def block(batch: Batch) -> float:
        fwd_bwd_future = await client.forward_backward_async(batch, LOSS)
        fwd_bwd_result = await fwd_bwd_future
        optim_future = await client.optim_step_async(ADAM)
        optim_result = await optim_future
        assert optim_result.metrics
        return fwd_bwd_result.loss

    async def loop() -> list[float]:
        return [await block(batch) for batch in BATCHES]

    assert ran(loop()) == losses_one_by_one


def test_tinker_overlapped_requests_and_better_implementation(
    client: tinker.TrainingClient, losses_one_by_one: list[float]
) -> None:
    async def block(batch: Batch) -> tuple[float, bool]:
        fwd_bwd_future = await client.forward_backward_async(batch, LOSS)
        optim_future = await client.optim_step_async(ADAM)
        fwd_bwd_result = await fwd_bwd_future
        optim_result = await optim_future
        return fwd_bwd_result.loss, optim_result.metrics is not None

    async def loop() -> list[tuple[float, bool]]:
        return [await block(batch) for batch in BATCHES]

    assert ran(loop()) == [(loss, True) for loss in losses_one_by_one]


def test_tinker_pipelined_demonstration(client: tinker.TrainingClient, losses_one_by_one: list[float]) -> None:
    async def submit(batch: Batch) -> Any:
        return (await client.forward_backward_async(batch, LOSS), await client.optim_step_async(ADAM))

    async def block() -> list[float]:
        losses, before = [], await submit(BATCHES[0])
        for batch in BATCHES[1:]:
            submitted = await submit(batch)
            losses.append((await before[0]).loss)
            await before[1]
            before = submitted
        return [*losses, (await before[0]).loss]

    assert ran(block()) == losses_one_by_one


# ---- Bios: async and futures ---------------------------------------------------------------------


def test_bios_async_requirement(server: Server) -> None:
    async def main() -> str:
        service_client = bios.ServiceClient()
        async with service_client:
            training_client = await service_client.create_lora_training_client_async(base_model=server.base_model)
            return training_client.model_id

    assert ":train:" in ran(main())


def test_bios_side_by_side_sync(server: Server) -> None:
    service_client = bios.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model=server.base_model)
    losses = []
    for batch in [BATCHES[0]] * 3:
        future = training_client.forward_backward(batch, LOSS)
        result = future.result()
        losses.append(result.loss)
        training_client.optim_step()
    service_client.close()
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]


def test_bios_side_by_side_async(server: Server) -> None:
    async def main() -> list[float]:
        service_client = bios.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(base_model=server.base_model)
        losses = []
        for batch in [BATCHES[0]] * 3:
            future = await training_client.forward_backward_async(batch, LOSS)
            result = await future
            losses.append(result.loss)
            await training_client.optim_step_async()
        service_client.close()
        return losses

    losses = ran(main())
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]


def test_bios_suboptimal_and_optimal_patterns_give_equal_results(
    service: bios.ServiceClient, client: bios.TrainingClient, server: Server
) -> None:
    async def slow_training() -> list[float]:
        losses = []
        for batch in BATCHES[:3]:
            future = await client.forward_backward_async(batch, LOSS)
            losses.append((await future).loss)
        return losses

    async def fast_training() -> list[float]:
        future1 = await twin.forward_backward_async(BATCHES[0], LOSS)
        future2 = await twin.forward_backward_async(BATCHES[1], LOSS)
        future3 = await twin.forward_backward_async(BATCHES[2], LOSS)
        return [(await future1).loss, (await future2).loss, (await future3).loss]

    twin = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    assert ran(slow_training()) == ran(fast_training())
    # Both add up all three gradients.
    metrics = [run.optim_step(ADAM).result().metrics or {} for run in (client, twin)]
    assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"] > 0


def test_bios_pipelined_training(client: bios.TrainingClient, losses_one_by_one: list[float]) -> None:
    async def pipelined_training(
        training_client: bios.TrainingClient, dataloader: list[Batch], pipeline_depth: int = 4
    ) -> list[float]:
        futures: deque[tuple[Any, Any]] = deque()
        losses = []
        for i, batch in enumerate(dataloader):
            if i >= pipeline_depth:
                break
            fwd_future = await training_client.forward_backward_async(batch, LOSS)
            opt_future = await training_client.optim_step_async(ADAM)
            futures.append((fwd_future, opt_future))
        for batch in dataloader[pipeline_depth:]:
            fwd_future, opt_future = futures.popleft()
            losses.append((await fwd_future).loss)
            await opt_future
            new_fwd = await training_client.forward_backward_async(batch, LOSS)
            new_opt = await training_client.optim_step_async(ADAM)
            futures.append((new_fwd, new_opt))
        while futures:
            fwd_future, opt_future = futures.popleft()
            losses.append((await fwd_future).loss)
            await opt_future
        return losses

    assert ran(pipelined_training(client, BATCHES, pipeline_depth=4)) == losses_one_by_one


def test_bios_concurrent_operations_with_gather(client: bios.TrainingClient) -> None:
    tokenizer = client.get_tokenizer()

    async def parallel_evaluation(
        training_client: bios.TrainingClient, test_prompts: list[types.ModelInput]
    ) -> list[types.SampleResponse]:
        sampling_client = training_client.save_weights_and_get_sampling_client(name="eval_checkpoint")
        sampling_tasks = []
        for prompt in test_prompts:
            task = sampling_client.sample_async(
                prompt=prompt, sampling_params=types.SamplingParams(max_tokens=8, stop=[])
            )
            sampling_tasks.append(task)
        futures = await asyncio.gather(*sampling_tasks)
        return await asyncio.gather(*futures)

    test_prompts = [types.ModelInput.from_ints(tokenizer.encode(text)) for text in ("One", "def two", "3")]
    results = ran(parallel_evaluation(client, test_prompts))
    assert [len(result.sequences[0].tokens) for result in results] == [8, 8, 8]
    assert all(isinstance(tokenizer.decode(r.sequences[0].tokens), str) for r in results)


def test_bios_error_handling(client: bios.TrainingClient) -> None:
    seen: list[Any] = []

    async def robust_training(training_client: bios.TrainingClient, dataloader: list[Batch]) -> None:
        for step, batch in enumerate(dataloader):
            try:
                fwd_future = await training_client.forward_backward_async(batch, LOSS)
                opt_future = await training_client.optim_step_async()
                fwd_result = await fwd_future
                await opt_future
                seen.append(fwd_result.loss / (step != 3))
            except BiosAPIError as error:
                seen.append(str(error))
                continue
            except TimeoutError:
                seen.append("late")
            except Exception:
                seen.append(training_client.save_state(name=f"error_step_{step}"))
                raise

    with pytest.raises(ZeroDivisionError):
        ran(robust_training(client, [BATCHES[0], BROKEN, BATCHES[0], BATCHES[0]]))
    before, refused, after, saved = seen
    assert "target_tokens is missing" in refused
    assert after < before
    assert saved.result().path.endswith("/weights/error_step_3")


# ---- MinT: async patterns ------------------------------------------------------------------------


def mint_batch(tokenizer: Any, text: str) -> list[types.Datum]:
    tokens = tokenizer.encode(text)
    model_input = types.ModelInput.from_ints(tokens[:-1])
    target_tokens = tokens[1:]
    weights = [1.0] * len(target_tokens)
    return [types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": target_tokens, "weights": weights})]


TEXTS = ["def one():", "return two", "for three in four:", "five + six"]


def test_mint_pattern_and_anti_pattern_give_equal_results(server: Server) -> None:
    async def train_with_pipelining() -> list[str]:
        service_client = mint.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(
            base_model=server.base_model, rank=16, seed=1
        )
        tokenizer = training_client.get_tokenizer()
        adam_params = types.AdamParams(learning_rate=5e-5)
        fb_futures = []
        for batch_text in TEXTS:
            data = mint_batch(tokenizer, batch_text)
            fb_future = training_client.forward_backward_async(data, loss_fn="cross_entropy")
            fb_futures.append(fb_future)
        fb_results = await asyncio.gather(*[f.result_async() for f in fb_futures])
        optim_future = training_client.optim_step_async(adam_params)
        await optim_future.result_async()
        service_client.close()
        return [f"Loss: {result.loss:.4f}" for result in fb_results]

    async def train_one_by_one() -> list[str]:
        service_client = mint.ServiceClient()
        training_client = await service_client.create_lora_training_client_async(
            base_model=server.base_model, rank=16, seed=1
        )
        tokenizer = training_client.get_tokenizer()
        losses = []
        for batch_text in TEXTS:
            result = await training_client.forward_backward_async(
                mint_batch(tokenizer, batch_text), "cross_entropy"
            ).result_async()
            losses.append(f"Loss: {result.loss:.4f}")
            # An optimizer step with rate 0, so that both compute the same.
            await training_client.optim_step_async(types.AdamParams(learning_rate=0)).result_async()
        service_client.close()
        return losses

    losses = ran(train_with_pipelining())
    assert losses == ran(train_one_by_one())
    assert len(set(losses)) == len(TEXTS)
