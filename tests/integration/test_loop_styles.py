"""Loop styles that run a pass and its step in one cycle: docs/guide/cycles-and-pipelining.md.

The server is in metronome mode, as the hosted services. Each loop is written as in the
documentation of its service. All loops run at once, because they wait most of the time. Requests
sent together may straddle a tick and then take two cycles: hence `any`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from tests.support.serving import Serving

Pairs = list[tuple[Any, Any]]
Loop = Callable[[TrainingClient], Any]
Shared = dict[Loop, list[bool]]

KEY = "tml-loops_key-of-sixteen-letters"
STEPS = 3
PERIOD_S = 2.0
ADAM = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
BATCH = [
    Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
]


def sync_naive(run: TrainingClient) -> Pairs:
    return [(run.forward_backward(BATCH, LOSS).result(), run.optim_step(ADAM).result()) for _ in range(STEPS)]


def sync_submit_both(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        passed, stepped = run.forward_backward(BATCH, LOSS), run.optim_step(ADAM)
        pairs.append((passed.result(), stepped.result()))
    return pairs


def sync_pipelined(run: TrainingClient) -> Pairs:
    sent = [(run.forward_backward(BATCH, LOSS), run.optim_step(ADAM)) for _ in range(STEPS)]
    return [(passed.result(), stepped.result()) for passed, stepped in sent]


async def tinker_and_bios_naive(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        passed = await (await run.forward_backward_async(BATCH, LOSS))
        pairs.append((passed, await (await run.optim_step_async(ADAM))))
    return pairs


async def tinker_and_bios_submit_both(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        passed = await run.forward_backward_async(BATCH, LOSS)
        stepped = await run.optim_step_async(ADAM)
        pairs.append((await passed, await stepped))
    return pairs


async def bios_overlapped_passes(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        sent = [await run.forward_backward_async(BATCH, LOSS) for _ in range(3)]
        passed = [await each for each in sent]
        pairs.append((passed[-1], await (await run.optim_step_async(ADAM))))
    return pairs


async def tinker_and_bios_pipelined(run: TrainingClient) -> Pairs:
    sent = [(await run.forward_backward_async(BATCH, LOSS), await run.optim_step_async(ADAM)) for _ in range(STEPS)]
    return [(await passed, await stepped) for passed, stepped in sent]


async def mint_anti_pattern(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        passed = await run.forward_backward_async(BATCH, LOSS).result_async()
        pairs.append((passed, await run.optim_step_async(ADAM).result_async()))
    return pairs


async def mint_gathered_before_the_step(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        sent = [run.forward_backward_async(BATCH, LOSS) for _ in range(3)]
        passed = await asyncio.gather(*[each.result_async() for each in sent])
        pairs.append((passed[-1], await run.optim_step_async(ADAM).result_async()))
    return pairs


async def mint_step_sent_behind_the_passes(run: TrainingClient) -> Pairs:
    pairs = []
    for _ in range(STEPS):
        sent = [run.forward_backward_async(BATCH, LOSS) for _ in range(3)]
        stepped = run.optim_step_async(ADAM)
        passed = await asyncio.gather(*[each.result_async() for each in sent])
        pairs.append((passed[-1], await stepped.result_async()))
    return pairs


WAITING = (sync_naive, tinker_and_bios_naive, bios_overlapped_passes, mint_anti_pattern, mint_gathered_before_the_step)
TOGETHER = (
    sync_submit_both,
    sync_pipelined,
    tinker_and_bios_submit_both,
    tinker_and_bios_pipelined,
    mint_step_sent_behind_the_passes,
)


@pytest.fixture(scope="module")
def shared(base_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """For each loop and each of its steps, True if the step ran in the cycle of its pass."""
    beat = ["--clock-mode=metronome", f"--clock-period-s={PERIOD_S}"]
    loops = (*WAITING, *TOGETHER)
    with (
        Serving(tmp_path_factory.mktemp("loops"), [base_model], [KEY], beat) as serving,
        ServiceClient(serving.address, KEY) as client,
        ThreadPoolExecutor(len(loops)) as threads,
    ):
        found = threads.map(lambda loop: in_one_cycle(client, loop), loops)
        yield dict(zip(loops, found, strict=True))


def in_one_cycle(service: ServiceClient, loop: Loop) -> list[bool]:
    run = service.create_lora_training_client("tiny", rank=2, seed=0)
    pairs = asyncio.run(loop(run)) if inspect.iscoroutinefunction(loop) else loop(run)
    cycles = [
        (passed.metrics["clock_cycle:unique"], stepped.metrics["clock_cycle:unique"]) for passed, stepped in pairs
    ]
    assert all(passed <= stepped for passed, stepped in cycles)
    return [passed == stepped for passed, stepped in cycles]


@pytest.mark.parametrize("loop", WAITING, ids=lambda loop: loop.__name__)
def test_a_loop_that_waits_for_the_pass_never_shares_its_cycle(shared: Shared, loop: Loop) -> None:
    assert not any(shared[loop])


@pytest.mark.parametrize("loop", TOGETHER, ids=lambda loop: loop.__name__)
def test_a_loop_that_sends_the_step_after_the_pass_shares_its_cycle(shared: Shared, loop: Loop) -> None:
    assert any(shared[loop])
