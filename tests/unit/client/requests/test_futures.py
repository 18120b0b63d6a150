"""Futures, and submitted requests, in threads and event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import threading

import pytest

from cotrain import BadRequestError, Datum, ModelInput, TrainingClient
from cotrain.errors import ClientClosed, RequestFailed
from cotrain.requests.futures import Future, Submitted
from cotrain.types import ForwardBackwardOutput
from tests.support.fake_api import FakeApi, refusal
from tests.support.waiting import until


@pytest.fixture
def outcome() -> concurrent.futures.Future[int]:
    return concurrent.futures.Future()


@pytest.fixture
def future(outcome: concurrent.futures.Future[int]) -> Future[int]:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    accepted.set_result(None)
    return Future(accepted, outcome)


def test_a_future_serves_threads_and_loops_any_number_of_times(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    async def three_waiters() -> list[int]:
        asyncio.get_running_loop().call_soon(outcome.set_result, 7)
        return [*await asyncio.gather(future, future.result_async(), future.result_async(timeout=60))]

    assert asyncio.run(three_waiters()) == [7, 7, 7]
    assert asyncio.run(future.result_async()) == 7  # on another loop, afterwards
    assert future.result(timeout=0) == 7
    assert future.done()


def test_a_waiter_on_another_thread_wakes_up(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(future.result()))
    waiter.start()
    outcome.set_result(3)
    waiter.join(timeout=120)
    assert results == [3]


def test_cancelling_a_wait_does_not_cancel_the_request(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.0)
        waiter = asyncio.create_task(future.result_async())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(give_up())
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert not future.done()
    outcome.set_result(1)  # after the waiters' loop is closed
    assert future.result() == 1


def test_a_failure_is_raised_in_every_waiter(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    outcome.set_exception(RequestFailed("no", "r", "user"))
    for _ in range(2):
        with pytest.raises(RequestFailed):
            future.result()
        with pytest.raises(RequestFailed):
            asyncio.run(future.result_async())


def test_a_closed_client_raises_an_error(future: Future[int], outcome: concurrent.futures.Future[int]) -> None:
    outcome.cancel()
    with pytest.raises(ClientClosed):
        future.result()
    with pytest.raises(ClientClosed):
        asyncio.run(future.result_async())


def test_a_timeout_error_names_the_pending_request_and_the_remedy() -> None:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = Future(accepted, outcome, what="optim_step 4 of run s:train:0")
    message = "^optim_step 4 of run s:train:0 is still on its way to the server after 0 s: wait again "
    with pytest.raises(TimeoutError, match=message):
        future.result(timeout=0)
    accepted.set_result(None)
    message = "is still running after 0.01 s: wait again for the same future$"
    with pytest.raises(TimeoutError, match=message):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError, match=message):
        asyncio.run(future.result_async(timeout=0.01))


def test_a_timeout_of_the_request_itself_is_raised_unchanged(
    future: Future[int], outcome: concurrent.futures.Future[int]
) -> None:
    outcome.set_exception(TimeoutError("the caller's loss took too long"))
    with pytest.raises(TimeoutError, match="the caller's loss"):
        future.result(timeout=0)


def test_a_future_shows_its_request_and_its_state() -> None:
    def made(outcome: concurrent.futures.Future[int]) -> Future[int]:
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        accepted.set_result(None)
        return Future(accepted, outcome, what="optim_step 4 of run r")

    done: concurrent.futures.Future[int] = concurrent.futures.Future()
    done.set_result(1)
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(RequestFailed("no such loss", "r:4", "user"))
    running = made(concurrent.futures.Future())
    assert repr(running) == "<Future of optim_step 4 of run r: still running>"
    assert repr(Submitted(running)) == f"<Submitted: {running!r}>"
    running.cancel()
    assert repr(running) == "<Future of optim_step 4 of run r: given up>"
    assert repr(made(done)) == "<Future of optim_step 4 of run r: done>"
    assert repr(made(failed)) == "<Future of optim_step 4 of run r: failed: no such loss>"
    with pytest.raises(RequestFailed):
        made(failed).result()


DATUM = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})


def send(run: TrainingClient, datums: int = 1) -> Submitted[ForwardBackwardOutput]:
    return run.forward_backward_async([DATUM] * datums, "cross_entropy")


def order_of(output: ForwardBackwardOutput) -> float:
    return output.metrics["clock_cycle:unique"]


def test_the_first_await_gives_the_future_and_the_second_the_result(run: TrainingClient) -> None:
    async def train() -> float:
        return order_of(await (await send(run)))

    assert asyncio.run(train()) == 1


def test_a_submitted_request_gives_its_result_to_threads_and_loops(run: TrainingClient) -> None:
    submitted = send(run)
    assert order_of(submitted.result(timeout=60)) == 1
    assert order_of(asyncio.run(submitted.result_async(timeout=60))) == 1
    assert submitted.done()


def test_pickling_raises_with_the_remedy(run: TrainingClient) -> None:
    for each in (run, send(run)):
        with pytest.raises(TypeError, match="clients and futures belong to their process"):
            pickle.dumps(each)


def test_requests_are_sent_in_the_order_of_the_calls(run: TrainingClient) -> None:
    async def train() -> list[float]:
        first, second, third = send(run), send(run), send(run)
        return [order_of(await third.result_async()), order_of(await (await first)), order_of(second.result())]

    assert asyncio.run(train()) == [3, 1, 2]


def test_a_request_that_is_never_awaited_is_sent(
    api: FakeApi, run: TrainingClient, recwarn: pytest.WarningsRecorder
) -> None:
    send(run)
    run.optim_step_async()
    gc.collect()
    assert order_of(run.forward([DATUM], "cross_entropy").result()) == 3
    assert [message.seq_id for message in api.passes.values()] == [1, 3]
    assert not recwarn.list


@pytest.mark.parametrize("over", ["the futures", "the results"])
def test_gather_accepts_either_form(run: TrainingClient, over: str) -> None:
    async def train() -> list[ForwardBackwardOutput]:
        sent = [send(run) for _ in range(5)]
        if over == "the results":
            return list(await asyncio.gather(*(each.result_async() for each in sent)))
        return list(await asyncio.gather(*await asyncio.gather(*sent)))

    assert [order_of(output) for output in asyncio.run(train())] == [1, 2, 3, 4, 5]


def test_a_submitted_request_can_be_used_as_a_coroutine(run: TrainingClient) -> None:
    async def train() -> list[float]:
        task = asyncio.create_task(send(run))
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(send(run))
        limited = await asyncio.wait_for(send(run), timeout=60)
        return [order_of(await future) for future in (await task, grouped.result(), limited)]

    assert asyncio.run(train()) == [1, 2, 3]
    assert order_of(asyncio.run(send(run)).result()) == 4


def test_any_number_of_tasks_may_await_one_request(api: FakeApi, run: TrainingClient) -> None:
    async def train() -> list[Future[ForwardBackwardOutput]]:
        submitted = send(run)
        tasks = [asyncio.create_task(submitted) for _ in range(3)]
        tasks[0].cancel()
        return [*await asyncio.gather(*tasks[1:]), await submitted, *await asyncio.gather(submitted)]

    first, *others = asyncio.run(train())
    assert [each is first for each in others] == [True] * 3
    assert len(api.passes) == 1


def test_a_cancelled_wait_does_not_cancel_training(api: FakeApi, run: TrainingClient) -> None:
    api.hold["pass:1"] = threading.Event()
    submitted = send(run)

    async def give_up() -> None:
        for awaitable in (submitted.result_async(), await submitted):
            task = asyncio.ensure_future(awaitable)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    api.hold["pass:1"].set()
    assert order_of(submitted.result()) == 1


def test_the_first_of_several_errors_is_raised(api: FakeApi, run: TrainingClient) -> None:
    api.answers["optim_step"] = [refusal(400, "too odd")]

    async def train() -> None:
        await asyncio.gather(run.optim_step_async(), send(run), run.optim_step_async())

    with pytest.raises(BadRequestError, match="too odd"):
        asyncio.run(train())


def test_a_loop_may_block_on_a_result_without_a_deadlock(run: TrainingClient) -> None:
    async def notebook() -> list[float]:
        blocking = run.forward_backward([DATUM], "cross_entropy").result(timeout=60)
        return [order_of(blocking), order_of(send(run).result(timeout=60)), run.get_info() is not None]

    assert asyncio.run(notebook()) == [1, 2, True]


def test_two_loops_and_a_thread_may_await_one_request(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()
    submitted = send(run)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(asyncio.run, submitted.result_async()),
            pool.submit(lambda: asyncio.run(submitted).result()),
            pool.submit(submitted.result),
        ]
        gate.set()
        assert [order_of(wait.result(timeout=60)) for wait in waits] == [1, 1, 1]


@pytest.mark.parametrize("what", ["Submitted", "Future"])
def test_use_as_the_result_raises_with_the_remedy(run: TrainingClient, what: str) -> None:
    taken = {"Submitted": send(run), "Future": send(run)._future}[what]
    with pytest.raises(AttributeError, match=r"await it.* call \.result\(\), before \.metrics"):
        taken.metrics  # type: ignore[attr-defined]  # noqa: B018


def test_an_unretrieved_failure_is_logged_once(
    api: FakeApi, run: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    api.answers["forward_backward"] = [refusal(400, "too odd")]
    send(run)  # garbage-collected before it fails
    asyncio.run(until(lambda: bool(caplog.records)))
    run.optim_step().result()
    assert [record.message for record in caplog.records] == [
        "forward_backward 1 of run s1:train:0 failed, and its result was never asked for: 400: too odd"
    ]


def test_a_retrieved_failure_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    met, unmet = Future(accepted, outcome), Future(accepted, outcome, what="b")
    with pytest.raises(TimeoutError):
        unmet.result(timeout=0)
    accepted.set_result(None)
    outcome.set_exception(RequestFailed("no", "r", "user"))
    with pytest.raises(RequestFailed):
        met.result()
    del met
    assert not caplog.records
    del unmet  # a caller waited for it and left before it failed
    assert [record.message for record in caplog.records] == ["b failed, and its result was never asked for: no"]


def test_a_cancelled_failure_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    outcome: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = Future(concurrent.futures.Future(), outcome)
    assert future.cancel()
    del future
    assert not caplog.records
