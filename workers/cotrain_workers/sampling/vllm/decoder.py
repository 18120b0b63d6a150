"""Decoder on a remote vLLM server: requests are sent over HTTP, and each step collects results.

One thread with an event loop does everything that waits for the network. The worker's thread only adds
requests and collects results, and never waits.
"""

import asyncio
import contextlib
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from cotrain_workers.engine.decoding.requests import Progress, SampleOutput, SampleRequest
from cotrain_workers.engine.ops import Failure, WeightsMissing
from cotrain_workers.sampling.vllm.client import VllmServer
from cotrain_workers.sampling.vllm.protocol import refusal
from cotrain_workers.sampling.vllm.requests import BROKEN, WEIGHTS_DELETED, VllmSampler

# Returns the PEFT folder of an adapter, or None while it is not written. Raises WeightsMissing.
FolderOf = Callable[[str], Path | None]

log = structlog.get_logger()

T = TypeVar("T")


@dataclass
class _Job:
    request: SampleRequest
    begun: threading.Event = field(default_factory=threading.Event)
    answer: Future[SampleOutput | Failure] | None = None  # None: its weights have no folder yet


class VllmDecoder:
    """Decoder on a vLLM server. For one thread, like every decoder."""

    def __init__(self, sampler: VllmSampler, folder: FolderOf) -> None:
        """Start without a wait. A background check logs if the server can be used."""
        self._sampler = sampler
        self._folder = folder
        self._jobs: dict[str, _Job] = {}
        self._answered: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._adapter_by_key: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        thread.start()
        # Nothing in the thread refers to the decoder, so that letting it go ends the thread.
        self._end = weakref.finalize(self, _end, self._loop, thread, sampler.server)
        self._run(self._sampler.ready())

    @property
    def busy(self) -> bool:
        """True if any request is unfinished."""
        return bool(self._jobs)

    @property
    def waiting(self) -> Counter[str]:
        """Number of requests per tenant that the server has not received any sequence of. While the server is
        unavailable, these are all new requests.
        """
        jobs = self._jobs.values()
        return Counter(job.request.tenant for job in jobs if not job.begun.is_set())

    @property
    def kv_cache_ratio(self) -> None:
        """None: the server reports it in its own metrics."""

    def refuse(self, request: SampleRequest) -> str | None:
        """Return the reason why this request can never run, or None."""
        return refusal(request, self._sampler.facts)

    def add(self, request: SampleRequest) -> None:
        """Send a request as soon as the folder of its weights is written."""
        job = self._jobs[request.id] = _Job(request)
        self._begin(job)

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its closed connections make the server abort it."""
        job = self._jobs.pop(request_id, None)
        if job and job.answer:
            job.answer.cancel()

    def step(self) -> Progress:
        """Collect the answers since the last step, and send requests whose folder has been written."""
        for job in [job for job in self._jobs.values() if job.answer is None]:
            self._begin(job)
        progress = Progress()  # nothing is streamed: a sequence arrives when it is whole
        for job in self._collect():
            if self._jobs.get(job.request.id) is job:  # else it was cancelled
                del self._jobs[job.request.id]
                output = _outcome(job)
                progress.finished.append((job.request.id, output))
                if isinstance(output, SampleOutput):
                    progress.decoded_tokens += sum(len(each.tokens) for each in output.sequences)
                    progress.prompt_tokens += len(job.request.prompt) - output.cached_prompt_tokens
        return progress

    def drop_weights(self, key: str) -> None:
        """Unload an adapter once it is unused, unless other weights have the same content."""
        name = self._adapter_by_key.pop(key, None)
        if name and name not in self._adapter_by_key.values():
            self._run(self._sampler.adapters.drop(name))

    def close(self) -> None:
        """Abort all requests and end the thread, as for a decoder that is garbage-collected. Idempotent."""
        self._end()

    def _begin(self, job: _Job) -> None:
        key = job.request.weights
        folder = None
        if key is not None:
            try:
                folder = self._folder(key)
            except WeightsMissing:
                job.answer = Future()
                job.answer.set_result(WEIGHTS_DELETED)
                self._answered.put(job)
                return
            if folder is None:
                return
            folder = folder.absolute()
            self._adapter_by_key[key] = folder.name
        job.answer = self._run(self._sampler.answer(job.request, folder, job.begun))
        answered = self._answered
        job.answer.add_done_callback(lambda _: answered.put(job))

    def _collect(self) -> Iterator[_Job]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._answered.get_nowait()

    def _run(self, work: Coroutine[None, None, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, server: VllmServer) -> None:
    asyncio.run_coroutine_threadsafe(_abort_all(server), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _abort_all(server: VllmServer) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.sleep(0)  # Python warns of a task of httpx that is cancelled before it starts
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()


def _outcome(job: _Job) -> SampleOutput | Failure:
    """Return the outcome of a request. After an unexpected error in the other thread, only this request fails."""
    assert job.answer is not None
    error = job.answer.exception()
    if error:
        log.error("vllm_request_failed", request=job.request.id, exc_info=error)
        return BROKEN
    return job.answer.result()
