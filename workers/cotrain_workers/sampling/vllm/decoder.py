"""Decoder on a vLLM server: requests are split into sequences, which are sent over HTTP and retried.

One thread with an event loop does everything that waits for the network (`VllmSampler`). The worker's thread only adds
requests and collects results, and never waits (`VllmDecoder`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple, TypeVar

import structlog

from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.checkpoints.peft_folder import FolderUnreadable, SumsUnusable
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest, StepResults
from cotrain_workers.engine.ops import Failure, WeightsMissing
from cotrain_workers.engine.spec import Target
from cotrain_workers.sampling.vllm.adapters import AdapterCopies, VllmAdapters
from cotrain_workers.sampling.vllm.client import (
    AdapterRefused,
    AdapterUnknown,
    Completion,
    ServerFacts,
    VllmRefused,
    VllmServer,
    VllmUnavailable,
    completion_body,
    refusal,
    sample_output,
)
from cotrain_workers.sampling.vllm.server_check import VllmUnusable, check_server

log = structlog.get_logger()

#: Maximum number of adapters on the server at once. It must not exceed `--max-cpu-loras` of vLLM.
MAX_ADAPTERS = 32
#: Maximum number of concurrent sequences on the server. vLLM itself runs 256 by default and queues the rest.
MAX_SEQUENCES = 256
#: Divisor of the number of slots; the quotient is reserved for tenants without a sequence in flight.
KEPT_SHARE = 16
#: First and longest pause in s before another try; each is twice the previous one.
PAUSE_S = (0.1, 5.0)
#: Number of failures of the server after it received a sequence, at which that sequence is regarded as the cause.
TRIES = 8
WEIGHTS_DELETED = Failure("The sampler's weights are gone. Save them again.", "server")
BROKEN = Failure("Internal error: the sampler failed on this request.", "server")
NOT_LOADED = Failure("Internal error: the sampler could not load these weights.", "server")
UNEMBEDDING = Failure(
    "The sampler of this base model cannot apply LoRA on the unembedding. "
    "Train with train_unembed=False to sample from it.",
    "user",
)
EXPERTS = Failure(
    "The sampler of this base model cannot apply LoRA on experts. Train with train_mlp=False to sample from it.", "user"
)
T = TypeVar("T")


class Adapter(NamedTuple):
    """PEFT folder of an adapter, named by its content, and the spec that it was trained with."""

    folder: Path
    spec: LoraSpec


# Returns an adapter, or None while it is not written. Raises WeightsMissing.
AdapterOf = Callable[[str], Adapter | None]


class VllmDecoder:
    """Decoder on a vLLM server. For one thread, like every decoder."""

    def __init__(self, sampler: VllmSampler, adapter_of: AdapterOf) -> None:
        """Start without a wait. A background check logs if the server can be used."""
        self._sampler = sampler
        self._adapter_of = adapter_of
        self._jobs: dict[str, _Job] = {}
        self._adapter_by_key: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        thread = Thread(target=self._loop.run_forever, name="vllm", daemon=True)
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

    def step(self) -> StepResults:
        """Collect the answers since the last step, and send requests whose folder has been written."""
        results = StepResults()  # nothing is streamed: a sequence arrives when it is whole
        for job in list(self._jobs.values()):
            if job.answer is None:
                self._begin(job)
            if job.answer is None or not job.answer.done():
                continue
            del self._jobs[job.request.id]
            output = _outcome(job.request, job.answer)
            results.finished.append((job.request.id, output))
            if isinstance(output, SampleOutput):
                results.decoded_tokens += sum(len(each.tokens) for each in output.sequences)
                results.prompt_tokens += len(job.request.prompt) - output.cached_prompt_tokens
        return results

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
        adapter = None
        if key is not None:
            try:
                adapter = self._adapter_of(key)
            except WeightsMissing:
                job.answer = Future()
                job.answer.set_result(WEIGHTS_DELETED)
                return
            if adapter is None:
                return
            self._adapter_by_key[key] = adapter.folder.name
        job.answer = self._run(self._sampler.answer(job.request, adapter, job.begun))

    def _run(self, work: Coroutine[None, None, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@dataclass
class _Job:
    request: SampleRequest
    begun: Event = field(default_factory=Event)
    answer: Future[SampleOutput | Failure] | None = None  # None: its weights have no folder yet


def _end(loop: asyncio.AbstractEventLoop, thread: Thread, server: VllmServer) -> None:
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


def _outcome(request: SampleRequest, answer: Future[SampleOutput | Failure]) -> SampleOutput | Failure:
    """Return the outcome of a request. After an unexpected error in the other thread, only this request fails."""
    error = answer.exception()
    if error:
        log.error("vllm_request_failed", request=request.id, exc_info=error)
        return BROKEN
    return answer.result()


@dataclass(eq=False)
class VllmSampler:
    """Sampler on one server, which splits requests into sequences. For one event loop.

    It retries a request while the server is unavailable. If the server rejects a request, only that request fails.
    """

    server: VllmServer
    base_model: str
    targets: Sequence[Target]
    shared: Path  # folder with the same path on the server, as the folders of all adapters
    copies: AdapterCopies | None = None  # fills `shared` if adapters are in an object store
    max_adapters: int = MAX_ADAPTERS
    max_sequences: int = MAX_SEQUENCES
    facts: ServerFacts | None = None  # None while the server is unavailable or fails the check

    def __post_init__(self) -> None:
        self.shared = self.shared.absolute()  # the server has another working directory
        self.adapters = VllmAdapters(self.server, self.max_adapters, self.copies)
        self._entry = TenantEntry(self.max_sequences)
        self._checking = asyncio.Lock()

    async def answer(self, request: SampleRequest, adapter: Adapter | None, begun: Event) -> SampleOutput | Failure:
        """Return the outcome of a request. Set `begun` before sending a sequence."""
        failure = _unsupported(request, adapter, await self.ready())
        if failure:
            return failure
        folder = adapter.folder.absolute() if adapter else None
        try:
            sequences = [
                asyncio.create_task(self._sequence(request, number, folder, begun))
                for number in range(request.num_samples)
            ]
            try:
                return sample_output(request, await asyncio.gather(*sequences))
            finally:
                for sequence in sequences:  # of a request that failed or was cancelled
                    sequence.cancel()
        except _Failed as failed:
            return failed.failure

    async def ready(self) -> ServerFacts:
        """Wait until the server passes the start-up check. Log each new reason for a failure."""
        async with self._checking:
            pause_s, last = PAUSE_S[0], ""
            while self.facts is None:
                try:
                    self.facts = await check_server(self.server, self.base_model, self.targets, self.shared)
                except (VllmUnavailable, VllmUnusable) as problem:
                    if str(problem) != last:
                        last = str(problem)
                        log.error("vllm_not_ready", reason=last)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_S[1])
                else:
                    log.info("vllm_ready", **vars(self.facts))
            return self.facts

    async def _sequence(self, request: SampleRequest, number: int, folder: Path | None, begun: Event) -> Completion:
        """Generate one sequence. Retry without limit while the server is unreachable, but at most TRIES times
        after the server received the sequence.
        """
        async with self._entry.of(request.tenant):
            tries = 0
            while tries < TRIES:
                facts = await self.ready()
                begun.set()
                try:
                    return await self._complete(request, number, folder, facts)
                except VllmUnavailable as unavailable:
                    tries += unavailable.is_reached
                    self.facts = None
                except OSError as failed:
                    log.warning("adapter_not_copied", folder=str(folder), reason=str(failed))
                    await asyncio.sleep(PAUSE_S[1])
                except AdapterUnknown:
                    tries += 1
                    if folder is None:
                        self.facts = None
                await asyncio.sleep(min(PAUSE_S[0] * 2**tries, PAUSE_S[1]))
        log.error("vllm_failed_on_request", request=request.id)
        raise _Failed(BROKEN)

    async def _complete(
        self, request: SampleRequest, number: int, folder: Path | None, facts: ServerFacts
    ) -> Completion:
        loaded = self.adapters.loaded(folder) if folder else nullcontext(facts.model)
        try:
            async with loaded as model:
                body = completion_body(request, number, model, facts.context_tokens)
                return await self.server.complete(body)
        except AdapterRefused as refused:
            log.error("vllm_refuses_adapter", folder=str(folder), reason=str(refused))
            raise _Failed(NOT_LOADED) from refused
        except FolderUnreadable as unreadable:
            raise _Failed(_unreadable(unreadable)) from unreadable
        except VllmRefused as refused:
            if refused.status in (401, 403):  # the API key has become wrong, which no request caused
                raise VllmUnavailable(str(refused), is_reached=False) from refused
            raise _Failed(Failure(f"The sampler refused this: {refused}", "user")) from refused


def _unsupported(request: SampleRequest, adapter: Adapter | None, facts: ServerFacts) -> Failure | None:
    """Return the failure of a request that this server can never run, or None."""
    if reason := refusal(request, facts):
        return Failure(reason, "user")
    if adapter and adapter.spec.train_unembed and not facts.adapts_unembedding:
        return UNEMBEDDING
    if adapter and adapter.spec.train_mlp and not facts.adapts_experts:
        return EXPERTS
    return None


class _Failed(Exception):
    """Failure of one request only."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _unreadable(error: FolderUnreadable) -> Failure:
    log.error("weights_unreadable", reason=str(error))
    if isinstance(error, SumsUnusable):
        return Failure(f"The sampler's weights cannot be read: {error}", "server")
    return WEIGHTS_DELETED


class TenantEntry:
    """Slots for `count` sequences, assigned fairly to tenants. For one event loop.

    It admits sequences to the server: the tenant with the fewest in flight goes first. A sequence in flight is
    never withdrawn. A part of all slots is therefore reserved for tenants without a sequence in flight. A tenant
    with many waits before it fills the server, and a newcomer is admitted at once.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._kept = count // KEPT_SHARE
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for one sequence of a tenant. Sequences of one tenant enter in order."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(admitted)
        self._let_in()
        try:
            await admitted
            yield
        finally:
            if admitted.done() and not admitted.cancelled():
                self._free += 1
                self._inside[tenant] -= 1
            self._let_in()

    def _let_in(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            admitted = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if admitted.done():  # cancelled
                continue
            self._free -= 1
            self._inside[tenant] += 1
            admitted.set_result(None)
        self._inside += Counter()  # drops tenants with a count of 0

    def _next(self) -> str | None:
        tenant = min(self._waiting, key=self._inside.__getitem__, default=None)
        if tenant is None or (self._inside[tenant] and self._free <= self._kept):
            return None
        return tenant
