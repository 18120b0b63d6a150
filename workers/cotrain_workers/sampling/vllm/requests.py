"""Execution of sample requests on a vLLM server."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import structlog

from cotrain_workers.checkpoints.peft_folder import CONFIG, FolderUnreadable, SumsUnusable
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.ops import Failure
from cotrain_workers.engine.spec import Target
from cotrain_workers.sampling.vllm.adapters import AdapterCopies, VllmAdapters
from cotrain_workers.sampling.vllm.client import (
    AdapterRefused,
    AdapterUnknown,
    VllmRefused,
    VllmServer,
    VllmUnavailable,
)
from cotrain_workers.sampling.vllm.protocol import Completion, ServerFacts, completion_body, refusal, sample_output
from cotrain_workers.sampling.vllm.startup_check import VllmUnusable, check_server

#: Maximum number of adapters on the server at once. It must not exceed `--max-cpu-loras` of vLLM.
MAX_ADAPTERS = 32
#: Maximum number of concurrent sequences on the server. vLLM itself runs 256 by default and queues the rest.
MAX_SEQUENCES = 256
#: Divisor of the number of slots; the quotient is reserved for tenants without a sequence in flight.
KEPT_SHARE = 16


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


log = structlog.get_logger()

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


class _Failed(Exception):
    """Failure of one request only."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


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

    async def answer(self, request: SampleRequest, folder: Path | None, begun: Event) -> SampleOutput | Failure:
        """Return the outcome of a request with the adapter in `folder`. Set `begun` before its first sequence is sent."""
        try:
            await self._refuse(request, folder)
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

    async def _refuse(self, request: SampleRequest, folder: Path | None) -> None:
        facts = await self.ready()
        reason = refusal(request, facts)
        if reason:
            raise _Failed(Failure(reason, "user"))
        if not folder or (facts.adapts_unembedding and facts.adapts_experts):
            return
        config = await self._config(folder)
        if not facts.adapts_unembedding and "lm_head" in config["target_modules"]:
            raise _Failed(UNEMBEDDING)
        if not facts.adapts_experts and config.get("target_parameters"):
            raise _Failed(EXPERTS)

    async def _config(self, folder: Path) -> dict[str, Any]:
        while True:
            try:
                await self.adapters.copy(folder.name)
                config: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
            except (FileNotFoundError, FolderUnreadable) as missing:
                raise _Failed(_unreadable(missing)) from missing
            except OSError:
                await asyncio.sleep(PAUSE_S[1])
            else:
                return config

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
                    if folder:
                        self.adapters.forget(folder.name)
                    else:
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


def _unreadable(error: Exception) -> Failure:
    log.error("weights_unreadable", reason=str(error))
    if isinstance(error, SumsUnusable):
        return Failure(f"The sampler's weights cannot be read: {error}", "server")
    return WEIGHTS_DELETED
