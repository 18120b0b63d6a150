"""From a saved adapter to its samples, with a worker that trains and leaves sampling to a vLLM server.

The server is a small one of ours over the worker's own tiny model (`fake_vllm.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from cotrain.wire.proto import wire_pb2
from cotrain_store.blobs.opening import MARK
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_workers.engine.engine import Engine
from cotrain_workers.sampling.vllm import decoder as vllm_decoder
from cotrain_workers.worker.loop import WorkerLoop
from tests.support.fake_vllm import FakeVllm
from tests.support.object_store import BadNetwork, SeaweedFS
from tests.support.program import LORA, submit
from tests.support.sampling import LONG, base_sampler, ended, sample, sampled, saved_sampler, submit_sample
from tests.support.stack import MODEL, Home, Stack, worker
from tests.support.waiting import until


@pytest.fixture
def vllm(tiny_model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model, MODEL) as fake:
        fake.context_tokens = 512
        yield fake


def vllm_worker(server: Stack, engine: Engine, vllm: FakeVllm) -> AbstractContextManager[WorkerLoop]:
    settings: dict[str, Any] = {"sampler": "vllm", "vllm_url": vllm.url}
    return worker(server, engine, **settings)


async def test_vllm_says_what_the_engine_says(server: Stack, engine: Engine, vllm: FakeVllm) -> None:
    run = await server.create("a", "a", LORA)
    greedy: dict[str, Any] = {"temperature": 0.0, "num_samples": 1, "prompt_logprobs": True}
    with worker(server, engine):
        await submit(server, run, 1, 4)
        sampler = await saved_sampler(server, run, 5)
        ours = wire_pb2.SampleResponse.FromString(await sample(server, sampler, 1, **greedy))
    with vllm_worker(server, engine, vllm):
        theirs = wire_pb2.SampleResponse.FromString(await sample(server, sampler, 2, **greedy))
    (one,), (other,) = ours.sequences, theirs.sequences
    assert one.tokens == other.tokens
    assert difference(one.logprobs, other.logprobs) < 1e-5  # fp32, other orders of summation
    assert difference(ours.prompt_logprobs, theirs.prompt_logprobs) < 1e-5


def difference(one: bytes, other: bytes) -> float:
    """Return the largest difference of two float32 arrays that leave out the same places."""
    apart = np.abs(np.frombuffer(one, np.float32) - np.frombuffer(other, np.float32))
    return float(np.nanmax(apart))


async def test_vllm_samples_from_adapters_in_an_object_store(
    server: Stack, tmp_path: Path, engine: Engine, vllm: FakeVllm,
    object_store: SeaweedFS, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(vllm_decoder, "PAUSE_S", (0.01, 0.1))
    with BadNetwork(object_store.port) as network:
        for name, value in object_store.variables(network.endpoint).items():
            monkeypatch.setenv(name, value)
        settings: dict[str, Any] = {"blobs": object_store.new_prefix()}
        object_store.store(settings["blobs"]).put(MARK, b"this Redis")
        run = await server.create("a", "a", LORA)
        with worker(Home(server.redis_url, tmp_path / "one"), engine, **settings):
            await submit(server, run, 1, 4)
            sampler = await saved_sampler(server, run, 5)
            ours = await sample(server, sampler, 1, temperature=0.0)
        settings |= {"sampler": "vllm", "vllm_url": vllm.url}
        with worker(Home(server.redis_url, tmp_path / "other"), engine, **settings):
            base = await base_sampler(server, number=1)
            await sample(server, base, 1)  # by now it has checked the server
            with network.failing("refuse"), capture_logs() as logs:
                request = await submit_sample(server, sampler, 2, temperature=0.0)
                await until(lambda: any(row["event"] == "adapter_not_copied" for row in logs))
            theirs = await sampled(server, sampler, request)
    one, other = (wire_pb2.SampleResponse.FromString(each).sequences[0] for each in (ours, theirs))
    assert one.tokens == other.tokens
    assert difference(one.logprobs, other.logprobs) < 1e-5
    copied = list((tmp_path / "other" / "vllm" / "w0").glob("??/*/adapter_model.safetensors"))
    assert len(copied) == 3  # with the two of the check
    assert not (tmp_path / "other" / "weights").exists()


async def test_a_sampler_stays_while_its_run_trains_on(server: Stack, engine: Engine, vllm: FakeVllm) -> None:
    run = await server.create("a", "a", LORA)
    with vllm_worker(server, engine, vllm):
        await submit(server, run, 1, 4)
        sampler = await saved_sampler(server, run, 5)
        before = await sample(server, sampler, 1)
        last = await submit(server, run, 5, 8, place=6)
        during = await sample(server, sampler, 2)
        await server.result(run, last[-1])
        later = await saved_sampler(server, run, 10, number=1)
        assert await sample(server, sampler, 3) == before == during
        assert await sample(server, later, 1) != before


async def test_a_restart_of_vllm_loses_no_request(server: Stack, engine: Engine, vllm: FakeVllm) -> None:
    sampler = await base_sampler(server)
    with vllm_worker(server, engine, vllm):
        first = await sample(server, sampler, 0, seed=0)
        vllm.may_generate.clear()
        requests = [await submit_sample(server, sampler, seq, seed=0) for seq in range(1, 6)]
        vllm.wait_until(generating=10)
        vllm.stop()
        vllm.may_generate.set()
        vllm.start()
        assert {await sampled(server, sampler, request) for request in requests} == {first}


async def test_a_worker_that_leaves_hands_its_requests_on(server: Stack, engine: Engine, vllm: FakeVllm) -> None:
    sampler = await base_sampler(server)
    with vllm_worker(server, engine, vllm):
        await sample(server, sampler, 0)
        vllm.may_generate.clear()
        request = await submit_sample(server, sampler, 1)
        vllm.wait_until(generating=2)
    vllm.wait_until(generating=0, aborted=2)
    vllm.may_generate.set()
    with vllm_worker(server, engine, vllm):
        await sampled(server, sampler, request)


async def test_a_cancelled_request_is_aborted_on_the_server(server: Stack, engine: Engine, vllm: FakeVllm) -> None:
    sampler = await base_sampler(server)
    with vllm_worker(server, engine, vllm):
        await sample(server, sampler, 0)
        vllm.may_generate.clear()
        request = await submit_sample(server, sampler, 1, LONG)
        vllm.wait_until(generating=1)
        await server.samples.cancel(sampler.tenant, request)
        assert await ended(server, sampler, request) == CANCELLED
        vllm.wait_until(generating=0, aborted=1)
